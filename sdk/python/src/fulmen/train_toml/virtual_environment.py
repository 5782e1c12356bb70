"""Checks an agent's own virtual environment: a folder of this machine, or the file of its requirements."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from fulmen.requirements_file import RequirementsInvalid, read_requirements

__all__ = ["OLDEST_PYTHON", "folder_problem", "python_of", "requirements_problems"]

OLDEST_PYTHON: Final = (3, 11)
"""Oldest version that runs Python agents."""

_ASK_TIMEOUT_S: Final = 20.0
_ASK: Final = "import sys; print(*sys.version_info[:2])"


def python_of(folder: Path) -> Path:
    """Returns the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def folder_problem(folder: Path, *, runs_callables: bool) -> str:
    """Returns why a folder cannot be an agent's virtual environment; empty if it can. Starts its interpreter.

    Args:
        folder: The environment.
        runs_callables: Whether it runs Python callables, which need `OLDEST_PYTHON`.
    """
    make = f"make it with `uv venv {folder}` or `python -m venv {folder}`"
    if not folder.is_dir():
        return f"there is no folder {folder}; {make}"
    if not (folder / "pyvenv.cfg").is_file():
        return f"{folder} is not a virtual environment: it has no pyvenv.cfg; {make}"
    python = python_of(folder)
    if not (python.is_file() and os.access(python, os.X_OK)):
        return f"{python} is missing, or links to a Python that was removed; {make} again"
    try:
        # -I and -S: nothing that is installed in it is run.
        asked = subprocess.run(
            [str(python), "-I", "-S", "-c", _ASK],
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            check=True,
            env={},
            stdin=subprocess.DEVNULL,
        )
        version = tuple(map(int, asked.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{python} cannot be run: {str(error)[:200]}; {make} again"
    if runs_callables and version < OLDEST_PYTHON:
        needed, found = (".".join(map(str, each)) for each in (OLDEST_PYTHON, version))
        return f"{folder} has Python {found}, but Python agents need {needed} or newer; {make} with a newer one, or use a command"
    return ""


def requirements_problems(file: Path) -> tuple[str, ...]:
    """Returns why a file cannot be an agent's file of requirements."""
    try:
        read_requirements(file.read_bytes())
    except RequirementsInvalid as error:
        return tuple(f"{file.name} {problem}" for problem in error.problems)
    except OSError as error:
        return (f"the file {file} cannot be read: {error.strerror}",)
    return ()
