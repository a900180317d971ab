"""Emulated RDMA hosts, scenarios and faults, driven through the command `softhca`."""

from ._command import Error, command
from ._hosts import Faults, Hosts, Program, ProgramResult
from ._scenarios import Expectation, Result, Rule, events, library, report, run, why

__all__ = [
    "Error",
    "Expectation",
    "Faults",
    "Hosts",
    "Program",
    "ProgramResult",
    "Result",
    "Rule",
    "command",
    "events",
    "library",
    "report",
    "run",
    "why",
]
