"""Looks for processes that should be gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["alive", "all_ended", "holders_of", "none_holds"]

_GONE_DEADLINE_S = 20.0


def alive(pid: int) -> bool:
    """Returns whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def holders_of(text: str) -> list[str]:
    """Names the processes, other than this one, that have a text among their arguments or in their environment."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            held = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in held:
            found.append(f"{path.name} {held[:200]!r}")
    return found


async def none_holds(text: str) -> None:
    """Waits until no process has a text among its arguments or in its environment.

    Raises:
        AssertionError: If some still has after a while.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GONE_DEADLINE_S
    while (found := holders_of(text)) and loop.time() < deadline:  # noqa: ASYNC110  # Strangers ring no bell.
        await asyncio.sleep(0.1)
    assert found == []


async def all_ended(pids: Iterable[int], *, limit_s: float = 90.0) -> None:
    """Waits until some processes have ended.

    Raises:
        TimeoutError: if one has not.
    """
    left = list(pids)
    async with asyncio.timeout(limit_s):
        while left := [pid for pid in left if alive(pid)]:  # noqa: ASYNC110  # Strangers ring no bell.
            await asyncio.sleep(0.05)
