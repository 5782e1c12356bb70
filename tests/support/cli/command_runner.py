"""Typer's runner of commands in the tests' own process, which puts an app's commands together once.

That takes longer than most commands do, and Typer would do it for every one.
"""

from __future__ import annotations

import functools

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner

__all__ = ["CliRunner", "built"]

built = functools.cache(get_command)
typer.testing._get_command = built  # type: ignore[attr-defined]
