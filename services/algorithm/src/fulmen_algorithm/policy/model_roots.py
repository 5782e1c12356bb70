"""The folders from which weights may be loaded.

A run and a policy version name folders of this machine; only those that the operator names are opened, whatever links
lead elsewhere.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fulmen_algorithm.runs.failure import RunFailed

SETTING = "the service's setting FULMEN_ALGORITHM_MODEL_ROOTS (docs/weights.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoots:
    """Folders below which weights may lie; by default any."""

    roots: tuple[Path, ...] = (Path("/"),)

    @classmethod
    def of(cls, setting: str, *, own: Sequence[Path]) -> Self:
        """Reads the setting, folders separated by `:`; the service's own folders are always allowed."""
        named = [Path(part).expanduser() for part in setting.split(os.pathsep) if part]
        return cls(roots=tuple(path.resolve() for path in (*named, *own)))

    def problem(self, path: Path | str) -> str:
        """Returns why a folder may not be opened; empty if it may. Links are followed first."""
        resolved = Path(path).expanduser().resolve()
        if any(resolved.is_relative_to(root) for root in self.roots):
            return ""
        return f"{path} is not below a folder of {SETTING}"

    def checked(self, path: Path | str) -> Path:
        """Returns a folder that may be opened.

        Raises:
            RunFailed: if it may not.
        """
        if problem := self.problem(path):
            raise RunFailed(f"Weights cannot be loaded: {problem}.")
        return Path(path).expanduser()


ANY_FOLDER = ModelRoots()
