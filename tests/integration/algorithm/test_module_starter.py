"""Engines and ranks are forked while there is a fork server, and started afresh when there is none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from fulmen_algorithm.clients import forked_child
from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter

LIMIT_S = 120
MODULE = "tests.support.service_kit.forked_program"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has fork servers")


async def started(modules: ModuleStarter, folder: Path) -> tuple[ModuleProcess, psutil.Process]:
    """Starts a process; returns it with its parent."""
    async with asyncio.timeout(LIMIT_S):
        child = await modules.start(MODULE, ["x"], environment={**os.environ, "PYTHONPATH": str(folder)})
        assert b'"arguments": ["x"]' in await child.first_line()
    return child, psutil.Process(child.pid).parent()


async def test_a_process_is_fresh_while_the_fork_server_is_dead(
    repository_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository_root))
    # What is loaded before is another test's: torch takes five seconds.
    monkeypatch.setattr(forked_child, "PRELOADED", "json")
    modules = ModuleStarter(warm=True)
    first, server = await started(modules, repository_root)
    assert "fulmen_service_kit.fork_server" in server.cmdline()
    server.send_signal(signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await first.wait() == -signal.SIGKILL

    second, parent = await started(modules, repository_root)

    assert parent.pid == os.getpid()
    await asyncio.gather(first.end(grace_s=0), second.end(grace_s=0))
    modules.close()


async def test_nothing_is_forked_if_the_setting_says_so(repository_root: Path) -> None:
    modules = ModuleStarter(warm=False)

    child, parent = await started(modules, repository_root)

    assert parent.pid == os.getpid()
    await child.end(grace_s=LIMIT_S)
    assert await child.wait() == -signal.SIGTERM
    modules.close()
