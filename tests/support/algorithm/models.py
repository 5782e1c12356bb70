"""The examples' models, built small, and their scripts, which are no package."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["EXAMPLES", "build_model", "load_script", "small_model"]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# Importing torch and transformers takes half a minute on a busy machine.
LIMIT_S = 180.0


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(folder: Path, seed: int = 0, *, hidden: int = 32, layers: int = 2) -> Path:
    """Builds the arithmetic example's model at a small size; returns its folder."""
    script = load_script(EXAMPLES / "arithmetic/make_model.py")
    script.build(str(folder), seed, hidden=hidden, layers=layers, heads=2, mlp=2 * hidden)
    return folder


async def build_model(script: Path, folder: Path) -> Path:
    """Builds a model in another process, so that the caller need not import torch; returns its folder.

    Args:
        script: An example's `make_model.py`.
        folder: The model's folder.

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
