"""A virtual environment as an agent's process needs it: its interpreter, variables, and the files that a sandbox must show.

Invariant: nothing of an environment is run here; what is installed in it is code of a tenant.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fulmen_runner.agents.venvs.modules import ModulePaths
from fulmen_runner.attempts.errors import AgentFailed

CONFIGURATION: Final = "pyvenv.cfg"
FOLDERS_SETTING: Final = "FULMEN_RUNNER_VENV_FOLDERS"
OLDEST_PYTHON: Final = (3, 11)
"""Oldest Python that runs the child's side of the runner."""

_MAX_CONFIGURATION_BYTES: Final = 64 * 1024
_MAX_LINKS: Final = 16
_START: Final = Path(__file__).parents[1] / "python" / "venv_start.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Venv:
    """A virtual environment.

    Attributes:
        folder: The environment.
        version: Version of its Python, major and minor.
        modules: What the runner gives to it.
        readable: What a sandbox must show besides the system's files: the environment, the Python that it is made of, and
            the modules.
    """

    folder: Path
    version: tuple[int, int]
    modules: ModulePaths
    readable: tuple[Path, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def child_argv(self) -> tuple[str, ...]:
        """Command line of a child that runs Python callables."""
        # -P: neither the folder of the script nor the working directory may shadow modules.
        return (str(self.python), "-P", str(_START), str(self.modules.first), str(self.modules.last))

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of an activated environment: its programs are first on PATH."""
        path = os.pathsep.join([str(self.folder / "bin"), inherited.get("PATH", os.defpath)])
        return {"PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def require_callables(self, target: str) -> None:
        """Raises AgentFailed if its Python is too old for Python agents."""
        if self.version < OLDEST_PYTHON:
            found, needed = (".".join(map(str, each)) for each in (self.version, OLDEST_PYTHON))
            raise AgentFailed(
                f"{target} cannot be run by {self.folder}: it has Python {found}, but Python agents need {needed} or newer. "
                "Make the environment with a newer one, or use a command"
            )


def allowed_venv(name: str, allowed: Sequence[Path] | None, modules: ModulePaths) -> Venv:
    """Returns the environment that an agent names. Blocks.

    Args:
        name: Absolute path.
        allowed: Folders below which it must be; None for any.
        modules: What the runner gives to it.

    Raises:
        AgentFailed: If it does not exist or is not allowed.
    """
    path = Path(name)
    if not path.is_absolute() or "\0" in name or ".." in path.parts:
        raise AgentFailed(f"virtual environment {name!r} must be an absolute path")
    real = path.resolve()
    if allowed is not None and not any(real.is_relative_to(each.resolve()) for each in allowed):
        # Does not say whether it exists.
        raise AgentFailed(
            f"virtual environment {name} may not be used on this runner, which isolates its agents: it is not below a folder "
            f"of {FOLDERS_SETTING}. Give `requirements` instead, and the runner builds the environment"
        )
    return _found(path, modules)


def built_venv(folder: Path, modules: ModulePaths) -> Venv:
    """Returns an environment that the runner has built, of its own Python.

    Nothing in it is believed: a package may have replaced any file, its configuration among them.
    """
    return Venv(folder=folder, version=sys.version_info[:2], modules=modules, readable=(folder, modules.sdk.parent))


def _found(path: Path, modules: ModulePaths) -> Venv:
    hint = (
        "Runners on other machines do not have it: give `requirements` instead, or require a label of runners that do"
    )
    try:
        with (path / CONFIGURATION).open("rb") as file:
            text = file.read(_MAX_CONFIGURATION_BYTES).decode(errors="replace")
    except OSError as error:
        raise AgentFailed(
            f"virtual environment {path} cannot be used on this runner: {error.strerror}. {hint}"
        ) from None
    values = dict(_pair(line) for line in text.splitlines() if "=" in line)
    version = values.get("version") or values.get("version_info") or ""
    numbers = version.split(".")[:2]
    venv = Venv(
        folder=path,
        version=(int(numbers[0]), int(numbers[1]))
        if len(numbers) == 2 and all(map(str.isdecimal, numbers))
        else (0, 0),
        modules=modules,
        readable=(*_readable(path, values.get("home", "")), modules.sdk.parent),
    )
    if not os.access(venv.python, os.X_OK):
        raise AgentFailed(
            f"virtual environment {path} has no working bin/python: the Python from which it was made was removed"
        )
    return venv


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name.strip().lower(), value.strip()


def _readable(folder: Path, home: str) -> tuple[Path, ...]:
    """Returns the environment, its interpreter with the links that lead there, and the libraries of that."""
    hops, hop = [], folder / "bin" / "python"
    for _ in range(_MAX_LINKS):
        if not hop.is_symlink():
            break
        hop = Path(os.path.normpath(hop.parent / hop.readlink()))
        if not hop.is_relative_to(folder):
            hops.append(hop)
    bases = dict.fromkeys([hop.parent.parent, *([Path(home).parent] if Path(home).is_absolute() else [])])
    parts = [base / part for base in bases for part in ("bin", "lib", "lib64")]
    return tuple(dict.fromkeys(path for path in (folder, folder.resolve(), *hops, *parts) if path.exists()))
