"""Puts the compiled library of the proxy into the wheel, where there is a compiler.

Without one the wheel is as good: the library is compiled where the proxy runs, or Python does its work.
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

NATIVE = Path("fulmen_llm_proxy/native")
OLDEST_GLIBC = (2, 17)
"""The oldest C library that has a tag of its own; see PEP 600."""


def platforms_of(library: Path) -> str:
    """Returns the tag of the platforms on which a library works. On Linux these have the C library that it needs, or a newer one."""
    needed = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    if platform.system() == "Linux":
        major, minor = max(*needed, OLDEST_GLIBC, OLDEST_GLIBC)
        return f"manylinux_{major}_{minor}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


class LibraryHook(BuildHookInterface[Any]):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, unless the installation is an editable one, which changes with its sources."""
        if version == "editable":
            return
        folder = Path(self.root) / "src" / NATIVE
        spec = importlib.util.spec_from_file_location("library", folder / "library.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._folder = tempfile.TemporaryDirectory()
        try:
            library = module.compile_library(folder / "tokens.cpp", Path(self._folder.name))
        except module.LibraryUnavailable as error:
            self.app.display_warning(f"the wheel has no compiled library: {error}")
            return
        build_data["force_include"][str(library)] = str(NATIVE / module.PREBUILT.name / library.name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platforms_of(library)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what the wheel has a copy of now."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
