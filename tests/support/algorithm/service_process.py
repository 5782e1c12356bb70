"""The algorithm service as a process of its own, with a store of the test and nothing else behind it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fulmen_service_kit.security.tokens import Role, TokenSigner

__all__ = ["KEY", "MODULE", "START_LIMIT_S", "TOKEN", "environment", "serving_at"]

KEY = "k" * 32
TOKEN = TokenSigner(KEY).issue(Role.SERVICE, subject="algorithm", ttl_s=3600)
START_LIMIT_S = 90
MODULE = [sys.executable, "-m", "fulmen_algorithm"]


def environment(state_dir: Path, **more: str) -> dict[str, str]:
    """Returns the service's settings: nothing behind it, ports of its own."""
    prefix = "FULMEN_ALGORITHM_"
    settings = {"PORT": "0", "METRICS_PORT": "0", "TOKEN": TOKEN, "STATE_DIR": str(state_dir), **more}
    return {**os.environ, **{f"{prefix}{name}": value for name, value in settings.items()}}


@asynccontextmanager
async def serving_at(state_dir: Path, store: str, **more: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Runs a service with a store at an address, and further settings; yields its process and its address."""
    process = subprocess.Popen(
        [*MODULE, "serve"],
        env=environment(state_dir, STORE_TARGET=store, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout
    try:
        line = await asyncio.to_thread(lambda: next(text for text in output if '"serving"' in text))
        yield process, f"127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate, timeout=START_LIMIT_S)
