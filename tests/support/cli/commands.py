"""Runs the command line of Fulmen as people do: as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Done", "fulmen", "run_module", "run_program"]

LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of standard output."""
        return self.stdout.rstrip("\n").rpartition("\n")[2]

    @property
    def last_document(self) -> Any:
        """What the last line of standard output says as JSON."""
        return json.loads(self.last_line)


async def fulmen(*arguments: str | Path, limit_s: float = LIMIT_S) -> Done:
    """Runs `fulmen ARGUMENTS`.

    Raises:
        TimeoutError: if it does not end within the limit; it is dead then.
    """
    words = [str(argument) for argument in arguments]
    return await run_program([sys.executable, "-m", "fulmen_cli", *words], {}, limit_s)


async def run_module(module: str, *arguments: str, environment: Mapping[str, str], limit_s: float = LIMIT_S) -> Done:
    """Runs `python -m MODULE ARGUMENTS` with more variables in its environment.

    Raises:
        TimeoutError: if it does not end within the limit; it is dead then.
    """
    return await run_program([sys.executable, "-m", module, *arguments], environment, limit_s)


async def run_program(command: list[str], environment: Mapping[str, str], limit_s: float) -> Done:
    """Runs a program with more variables in its environment.

    Raises:
        TimeoutError: if it does not end within the limit; it is dead then.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        async with asyncio.timeout(limit_s):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(status=process.returncode, stdout=stdout.decode(), stderr=stderr.decode())
