"""Puts the files of a release tree into the wheel: `.ci/release` creates the tree and calls this with its path.

An editable installation has none: it uses SOFTHCA_COMMAND or the command in PATH.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ReleaseTree(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if "SOFTHCA_TREE" not in os.environ:
            raise RuntimeError("SOFTHCA_TREE is not set: run `.ci/release`, which builds the wheel of this package")
        tree = Path(os.environ["SOFTHCA_TREE"])
        build_data["tag"] = f"py3-none-{os.environ['SOFTHCA_PLATFORM']}"
        build_data["pure_python"] = False
        build_data["shared_scripts"] = {str(tree / "bin/softhca"): "softhca"}
        build_data["shared_data"] = {
            str(tree / "lib/softhca"): "lib/softhca",
            str(tree / "share/softhca"): "share/softhca",
            str(tree / "share/man"): "share/man",
        }
