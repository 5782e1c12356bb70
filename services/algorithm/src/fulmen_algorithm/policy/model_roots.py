"""The folders from which weights may be loaded.

A run and a policy version name folders of this machine; only those that the operator names and those of the project's own
runs and models are opened, whatever links lead elsewhere.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fulmen_algorithm.runs.failure import RunFailed

SETTING = "the service's setting FULMEN_ALGORITHM_MODEL_ROOTS (docs/weights.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoots:
    """Folders below which weights may be; by default any.

    Attributes:
        roots: Folders for every project.
        runs: Folder of the runs, in which each project has its own; None if there is none.
        models: Folder of the uploaded models, likewise.
    """

    roots: tuple[Path, ...] = (Path("/"),)
    runs: Path | None = None
    models: Path | None = None

    @classmethod
    def of(cls, setting: str, *, runs: Path | None = None, models: Path | None = None) -> Self:
        """Reads the setting, folders separated by `:`."""
        named = [Path(part).expanduser() for part in setting.split(os.pathsep) if part]
        roots = tuple(path.resolve() for path in named)
        return cls(roots=roots, runs=runs and runs.resolve(), models=models and models.resolve())

    def problem(self, path: Path | str, *, project: str) -> str:
        """Returns why a project may not open a folder; empty if it may. Links are followed first."""
        try:
            resolved = Path(path).expanduser().resolve()
        except (ValueError, RuntimeError):
            # A character that no path has, or the home of an unknown user.
            return f"{str(path)!r} is not a path of this machine"
        allowed = self.roots
        for folder in (self.runs, self.models):
            if folder is not None and resolved.is_relative_to(folder):
                allowed = (folder / project.rpartition("/")[2],)
        if any(resolved.is_relative_to(root) for root in allowed):
            return ""
        return f"{path} is not below a folder of {SETTING}; use `fulmen model upload` for your own models"

    def checked(self, path: Path | str, *, project: str) -> Path:
        """Returns a folder that a project may open.

        Raises:
            RunFailed: if it may not.
        """
        if problem := self.problem(path, project=project):
            raise RunFailed(f"Weights cannot be loaded: {problem}.")
        return Path(path).expanduser()


ANY_FOLDER = ModelRoots()
