"""The command `softhca`: where it is, and how its errors are reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path


class Error(Exception):
    """The command failed, or it cannot be found. The message is that of the command."""


def command() -> Path:
    """The path of the command: `SOFTHCA_COMMAND`, the one that this package installed, or the first one in PATH."""
    chosen = os.environ.get("SOFTHCA_COMMAND")
    if chosen:
        return Path(chosen)
    for folder in (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")):
        installed = Path(folder, "softhca")
        if installed.is_file():
            return installed
    found = shutil.which("softhca")
    if found is None:
        raise Error("the command softhca is not installed beside this package, and PATH does not have it")
    return Path(found)


def output(arguments: Sequence[str | os.PathLike[str]], accepted: Sequence[int] = (0,)) -> str:
    """Runs the command and returns what it prints. Another exit code than those accepted raises `Error`."""
    done = subprocess.run(
        [command(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode not in accepted:
        raise Error(done.stderr.strip() or f"softhca {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout
