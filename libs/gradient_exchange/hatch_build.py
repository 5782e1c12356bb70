"""Puts a compiled library of the exchange's kernels into the wheel, where there is a compiler.

Without one the wheel is as good, and its kernels are compiled where they run, or run in torch's operations.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("fulmen_exchange/kernels")
OLDEST_GLIBC = (2, 17)
"""The oldest C library that has a tag of its own; see PEP 600."""


def platforms_of(library: Path) -> str:
    """Returns the tag of the platforms on which a library works. On Linux these have the C library that it needs, or a newer one."""
    needed = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    if platform.system() == "Linux" and needed:
        major, minor = max(*needed, OLDEST_GLIBC)
        return f"manylinux_{major}_{minor}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


class KernelsHook(BuildHookInterface[Any]):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, unless the installation is an editable one, which changes with its sources."""
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("loader", Path(self.root) / "src" / KERNELS / "loader.py")
        assert spec is not None
        assert spec.loader is not None
        loader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loader)
        self._folder = tempfile.TemporaryDirectory()
        try:
            library = loader.compile_portable(Path(self._folder.name))
        except loader.KernelsUnavailable as error:
            self.app.display_warning(f"the wheel has no compiled kernels: {error}")
            return
        build_data["force_include"][str(library)] = str(KERNELS / loader.PREBUILT.name / library.name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platforms_of(library)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what the wheel has a copy of now."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
