"""Scenario files and their verdicts; event logs, explanations and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ._command import Error, command, output



@dataclass(frozen=True)
class Rule:
    """A fault rule of a scenario, and how often it acted."""

    name: str
    fired: int
    optional: bool


@dataclass(frozen=True)
class Expectation:
    """An expectation of a scenario, and whether it held."""

    text: str
    held: bool
    detail: str | None


@dataclass(frozen=True)
class Result:
    """The verdict of one run of a scenario."""

    scenario: str
    title: str
    seed: int
    on: str
    verdict: Literal["pass", "fail", "error"]
    trace_sha256: str | None
    #: A command that repeats the run.
    replay: str
    rules: tuple[Rule, ...]
    expectations: tuple[Expectation, ...]
    #: The whole JSON object that the command printed.
    data: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every expectation held."""
        return self.verdict == "pass"

    @property
    def failures(self) -> list[Expectation]:
        """The expectations that did not hold."""
        return [expectation for expectation in self.expectations if not expectation.held]


def parse_result(line: str) -> Result:
    """Reads an object that `--json` prints."""
    data = json.loads(line)
    return Result(
        scenario=data["scenario"],
        title=data["title"],
        seed=data["seed"],
        on=data["on"],
        verdict=data["verdict"],
        trace_sha256=data["trace_sha256"],
        replay=data["replay"],
        rules=tuple(Rule(rule["name"], rule["fired"], rule["optional"]) for rule in data["rules"]),
        expectations=tuple(
            Expectation(found["text"], found["held"], found.get("detail")) for found in data["expectations"]
        ),
        data=data,
    )


def run(
    *files: str | os.PathLike[str],
    on: Literal["sim", "udp"] = "sim",
    seed: int | None = None,
    seeds: tuple[int, int] | None = None,
    set: Mapping[str, object] | None = None,
    out: str | os.PathLike[str] | None = None,
    expect: str | os.PathLike[str] | None = None,
) -> list[Result]:
    """Runs scenario files, or folders of them, and returns the verdict of each run.

    `seeds` is the first and the last seed. `out` is a folder for event logs, captures and reports. `Error` means that
    a file cannot be used; a failed expectation is a result.
    """
    arguments: list[str | os.PathLike[str]] = ["run", "--json", "--on", on]
    if seed is not None:
        arguments += ["--seed", str(seed)]
    if seeds is not None:
        arguments += ["--seeds", f"{seeds[0]}..{seeds[1]}"]
    for name, value in (set or {}).items():
        arguments += ["--set", f"{name}={value}"]
    if out is not None:
        arguments += ["--out", out]
    if expect is not None:
        arguments += ["--expect", expect]
    printed = output([*arguments, "--", *files], accepted=(0, 1))
    return [parse_result(line) for line in printed.splitlines()]


def library() -> Path:
    """The folder of the scenarios that are installed with the command."""
    folder = command().resolve().parent.parent / "share/softhca/scenarios"
    if not folder.is_dir():
        raise Error(f"{folder} does not exist: this command was installed without scenarios")
    return folder


def events(log: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a log, in order. A last line that is still being written is left out."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        next(lines, None)  # the header
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def why(log: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The explanations of failed work requests, from an event log or a capture: the objects of `softhca why --json`."""
    return [json.loads(line) for line in output(["why", "--json", log]).splitlines()]


def report(source: str | os.PathLike[str], file: str | os.PathLike[str]) -> Path:
    """Creates an HTML report from an event log, a capture or the folder of a run."""
    output(["report", source, "-o", file])
    return Path(file)
