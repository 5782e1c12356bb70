"""Builds the tiny untrained model of an example in a process of its own: torch need not be imported by the tests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

__all__ = ["build_model"]

# Importing torch and transformers takes half a minute on a busy machine.
LIMIT_S = 180.0


async def build_model(script: Path, folder: Path) -> Path:
    """Runs an example's `make_model.py`; returns the folder of the model.

    Raises:
        AssertionError: if the script fails.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(folder), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return folder
