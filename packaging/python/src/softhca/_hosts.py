"""Emulated hosts, which are cards of a daemon of their own, and programs on them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from ._command import Error, command, output
from ._scenarios import Result, events, parse_result, report, why

_numbers = itertools.count(1)
# Ends a daemon whose test run was killed.
_IDLE_SECONDS = "600"
_EXPECTATION_FAILED = 123


class Faults:
    """Faults and expectations for the next program that starts. The keys are those of scenario files."""

    def __init__(self) -> None:
        self._tables: list[tuple[str, Mapping[str, Any]]] = []

    def add(self, **fault: Any) -> None:
        """Adds a `[[fault]]`: `add(on="bob -> alice", match={"qp": "bob.1", "psn": "+2"}, action="drop")`."""
        self._tables.append(("fault", fault))

    def expect(self, **expectation: Any) -> None:
        """Adds an `[[expect]]`: `expect(completion={"qp": "bob.1", "status": "RETRY_EXC_ERR"})`."""
        self._tables.append(("expect", expectation))

    def __bool__(self) -> bool:
        return bool(self._tables)

    def _take(self) -> list[tuple[str, Mapping[str, Any]]]:
        tables, self._tables = self._tables, []
        return tables


class ProgramResult:
    """A program that has ended: its exit code, its outputs and, with faults, the verdict."""

    def __init__(self, arguments: Sequence[str], returncode: int, stdout: str, stderr: str, verdict: Result | None):
        self.arguments = list(arguments)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        self.verdict = verdict

    def check(self) -> ProgramResult:
        """Raises `Error` unless the program ended with 0 and every expectation held."""
        if self.returncode == 0:
            return self
        reason = f"ended with exit code {self.returncode}"
        if self.returncode == _EXPECTATION_FAILED and self.verdict is not None and not self.verdict.passed:
            reason = "an expectation did not hold: " + "; ".join(found.text for found in self.verdict.failures)
        raise Error(f"{' '.join(self.arguments)}: {reason}\n{self.stdout}{self.stderr}".rstrip())


class Program:
    """A program that runs on an emulated host. Files take its outputs, so that it never waits for a reader."""

    def __init__(
        self, arguments: Sequence[str], process: subprocess.Popen[bytes], outputs: Sequence[IO[str]], has_verdict: bool
    ):
        self.arguments = list(arguments)
        self.process = process
        self._outputs = outputs
        self._has_verdict = has_verdict

    def wait(self, timeout: float | None = 60, check: bool = True) -> ProgramResult:
        """Waits for the end of the program. A program that runs longer is killed, and raises `TimeoutExpired`."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        stdout, stderr = self.outputs()
        verdict = None
        if self._has_verdict:
            *lines, last = stdout.splitlines(keepends=True) or [""]
            if last.startswith('{"scenario":'):
                stdout, verdict = "".join(lines), parse_result(last)
        result = ProgramResult(self.arguments, self.process.returncode, stdout, stderr, verdict)
        return result.check() if check else result

    def outputs(self) -> tuple[str, str]:
        """What the program has printed so far: standard output and standard error."""
        texts = []
        for file in self._outputs:
            file.seek(0)
            texts.append(file.read())
        return texts[0], texts[1]

    def kill(self) -> None:
        """Ends the program and its children with SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Hosts:
    """Emulated hosts, each with an address of its own: a daemon that lives as long as the `with` block.

    >>> with Hosts("alice", "bob") as hosts:
    ...     server = hosts.start("alice", ["ib_write_bw"])
    ...     hosts.run("bob", ["ib_write_bw", hosts.address("alice")])

    `folder` keeps the event log and the capture; without it they are in a temporary folder that ends with the hosts.
    """

    def __init__(
        self,
        *names: str,
        recovery: Literal["fatal", "go-back-n", "go-back-0"] | None = None,
        cards: int | None = None,
        profile: Literal["softhca", "rxe", "mlx5"] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ):
        self.names = names or ("alice", "bob")
        #: Faults and expectations of the next program that starts.
        self.faults = Faults()
        #: The name of the daemon, for `softhca --name`.
        self.daemon = f"py-{os.getpid()}-{next(_numbers)}"
        self._recovery, self._cards, self._profile, self._folder = recovery, cards, profile, folder
        self._temporary: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._addresses: dict[str, str] = {}
        self._programs: list[Program] = []
        self._path = Path()

    def __enter__(self) -> Hosts:
        if self._folder is None:
            self._temporary = tempfile.mkdtemp(prefix="softhca-")
        self._path = Path(self._folder or self._temporary or ".")
        self._path.mkdir(parents=True, exist_ok=True)
        arguments: list[str | os.PathLike[str]] = ["daemon", "--name", self.daemon, "--idle-timeout", _IDLE_SECONDS]
        arguments += ["--log", self.log, "--capture", self.capture]
        for name in self.names:
            arguments += ["--host", name]
        if self._profile is not None:
            arguments += ["--profile", self._profile]
        if self._recovery is not None:
            arguments += ["--recovery", self._recovery]
        if self._cards is not None:
            arguments += ["--cards", str(self._cards)]
        with open(self._path / "daemon.txt", "w+") as messages:
            self._process = subprocess.Popen(
                [command(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("ready: "):
                    return self
                host, _, address = line.split()
                self._addresses.setdefault(host, address)
            self._process.wait()
            messages.seek(0)
            error = messages.read().strip() or "the daemon ended before it was ready"
        self.stop()
        raise Error(error)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        """The event log of all hosts."""
        return self._path / "events.jsonl"

    @property
    def capture(self) -> Path:
        """The capture of all packets that leave the hosts, for Wireshark and `softhca trace`."""
        return self._path / "capture.pcapng"

    def address(self, host: str) -> str:
        """The IP address of a host."""
        return self._addresses[host]

    def start(
        self,
        host: str,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Program:
        """Starts a program on a host, with the faults that were added since the last start."""
        if host not in self._addresses:
            raise Error(f"there is no host {host!r}, only {', '.join(self._addresses)}")
        words = [os.fspath(argument) for argument in arguments]
        options = ["--name", self.daemon, "--host", host]
        tables = self.faults._take()
        if tables:
            scenario = self._path / f"faults-{len(self._programs) + 1}.toml"
            scenario.write_text(_scenario(self.names, self._recovery, tables), encoding="utf-8")
            options += ["--json", "--scenario", str(scenario)]
        number = len(self._programs) + 1
        paths = [self._path / f"program-{number}-{stream}.txt" for stream in ("stdout", "stderr")]
        # The program writes through descriptors of its own: reading does not move its position.
        for path in paths:
            path.touch()
        writers = [os.open(path, os.O_WRONLY | os.O_APPEND) for path in paths]
        process = subprocess.Popen(
            [command(), "exec", *options, "--", *words],
            stdin=subprocess.DEVNULL,
            stdout=writers[0],
            stderr=writers[1],
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            start_new_session=True,
        )
        for writer in writers:
            os.close(writer)
        readers = [open(path, encoding="utf-8", errors="replace") for path in paths]
        program = Program(words, process, readers, bool(tables))
        self._programs.append(program)
        return program

    def run(
        self,
        host: str,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        timeout: float | None = 60,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> ProgramResult:
        """Runs a program on a host to its end. With `check`, raises `Error` if it or an expectation fails."""
        return self.start(host, arguments, env=env, cwd=cwd).wait(timeout, check)

    def environment(self, host: str) -> dict[str, str]:
        """The variables with which a program uses a host, for programs that something else starts."""
        text = output(["env", "--name", self.daemon, "--host", host])
        shell = subprocess.run(
            ["/bin/sh", "-c", f"{text}\nexec env -0"], env={}, capture_output=True, text=True, check=True
        )
        found = dict(entry.split("=", 1) for entry in shell.stdout.split("\0") if entry)
        return {name: value for name, value in found.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}

    def link(self, host: str, state: Literal["up", "down"]) -> None:
        """Takes the port of a host's first card down, or brings it up."""
        printed = output(["devices", "--name", self.daemon, "--json"])
        devices = [json.loads(line) for line in printed.splitlines()]
        device = next(found["device"] for found in devices if found["host"] == host)
        output(["link", "--name", self.daemon, device, state])

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of all hosts so far."""
        return events(self.log)

    def why(self) -> list[dict[str, Any]]:
        """The explanations of work requests that failed so far."""
        return why(self.log)

    def report(self, file: str | os.PathLike[str]) -> Path:
        """Creates an HTML report of everything so far."""
        return report(self.log, file)

    def stop(self) -> None:
        """Kills the programs that still run, and ends the daemon."""
        for program in self._programs:
            if program.process.poll() is None:
                program.kill()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def _scenario(names: Sequence[str], recovery: str | None, tables: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A scenario file with these faults and expectations."""
    lines = ['title = "faults of a Python program"']
    if recovery is not None:
        lines.append(f"device = {_toml({'recovery': recovery})}")
    lines.append(f"hosts = {_toml({name: {} for name in names})}")
    for kind, table in tables:
        lines.append(f"[[{kind}]]")
        lines += [f"{json.dumps(key.replace('_', '-'))} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value in TOML. A string of JSON is one of TOML too."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(found)}" for key, found in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value)
    raise TypeError(f"a scenario file has no value of type {type(value).__name__}: {value!r}")
