"""A child that hangs is noticed and ended, one that is merely slow is not; with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen_service_kit import heartbeat
from fulmen_service_kit.heartbeat import EXIT_HUNG, HUNG_AFTER_S, Pulse, ended

LIMIT_S = 60.0
SOON_S = 3.0
"""Silence after which a child hangs where only what follows is of interest: three beats."""
KEEPER = [sys.executable, "-m", "fulmen_service_kit.heartbeat"]
SOON = f"from fulmen_service_kit import heartbeat; heartbeat.HUNG_AFTER_S = {SOON_S}; heartbeat.main()"
QUICK_KEEPER = [sys.executable, "-c", SOON]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child hangs after `SOON_S`."""
    monkeypatch.setattr(heartbeat, "HUNG_AFTER_S", SOON_S)


CHILD = """
import asyncio, os, sys, time
from pathlib import Path
from fulmen_service_kit.heartbeat import heartbeat

async def main(folder):
    heartbeat().start()
    await asyncio.sleep(0)
    assert "FULMEN_HEARTBEAT_FD" not in os.environ
    with (folder / "lives").open("a") as lives:
        lives.write(f"{os.getpid()}\\n")
    while not (folder / "block").exists():
        await asyncio.sleep(0.02)
        if (folder / "end").exists():
            await asyncio.sleep(float((folder / "end").read_text() or 0))
            return
    (folder / "block").unlink()
    (folder / "blocks").touch()
    time.sleep(3600)

asyncio.run(main(Path(sys.argv[1])))
"""
SPIN = "import os\nos.nice(0)\nwhile True: pass"


@contextlib.asynccontextmanager
async def child(folder: Path, *prefix: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Pulse]]:
    """Yields a child that serves."""
    pulse = Pulse()
    process = await asyncio.create_subprocess_exec(
        *prefix, sys.executable, "-c", CHILD, str(folder),
        env={**os.environ, **pulse.environment}, pass_fds=pulse.descriptors, stderr=subprocess.PIPE,
    )  # fmt: skip
    pulse.started(process.pid)
    try:
        await lives_of(folder, 1)
        yield process, pulse
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def lives_of(folder: Path, count: int) -> list[int]:
    """Waits until the child has begun so often; returns its process ids."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(FileNotFoundError):
                pids = [int(line) for line in (folder / "lives").read_text().split()]
                if len(pids) >= count:
                    return pids
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("soon")
async def test_a_stopped_child_is_killed(tmp_path: Path) -> None:
    async with child(tmp_path) as (process, pulse), asyncio.timeout(LIMIT_S):
        process.send_signal(signal.SIGSTOP)
        assert await ended(process.wait, process.send_signal, pulse) == EXIT_HUNG
        assert process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("soon")
async def test_a_child_whose_loop_is_blocked_is_aborted_and_says_where_it_was(tmp_path: Path) -> None:
    async with child(tmp_path) as (process, pulse), asyncio.timeout(LIMIT_S):
        (tmp_path / "block").touch()
        assert await ended(process.wait, process.send_signal, pulse) == EXIT_HUNG
        assert process.returncode == -signal.SIGABRT
        assert process.stderr is not None
        assert b"in main" in await process.stderr.read()


async def test_a_child_that_ends_by_itself_has_its_own_status(tmp_path: Path) -> None:
    async with child(tmp_path) as (process, pulse), asyncio.timeout(LIMIT_S):
        (tmp_path / "end").touch()
        assert await ended(process.wait, process.send_signal, pulse) == 0


@pytest.mark.usefixtures("soon")
async def test_a_child_that_takes_its_time_to_end_is_not_hung(tmp_path: Path) -> None:
    async with child(tmp_path) as (process, pulse), asyncio.timeout(LIMIT_S):
        (tmp_path / "end.tmp").write_text(str(SOON_S + 1))
        (tmp_path / "end.tmp").rename(tmp_path / "end")
        assert await ended(process.wait, process.send_signal, pulse) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="run queues are read from Linux's /proc")
@pytest.mark.long(short=True)
async def test_a_child_that_waits_for_a_processor_is_not_hung(tmp_path: Path) -> None:
    """Beside busy processes at a much better priority on its only processor, it is late and lives."""
    cpu = str(min(os.sched_getaffinity(0)))
    async with child(tmp_path, "taskset", "-c", cpu, "nice", "-n", "19") as (process, pulse):
        busy = [subprocess.Popen(["taskset", "-c", cpu, sys.executable, "-c", SPIN]) for _ in range(6)]
        try:
            until = time.monotonic() + 2 * HUNG_AFTER_S
            while time.monotonic() < until:
                assert not pulse.is_hung()
                await asyncio.sleep(0.5)
        finally:
            for each in busy:
                each.kill()
                each.wait()
        assert process.returncode is None


async def test_a_program_is_started_again_when_it_hangs_or_is_killed_and_not_when_it_has_ended(tmp_path: Path) -> None:
    keeper = await asyncio.create_subprocess_exec(
        *QUICK_KEEPER, "--restart", sys.executable, "-c", CHILD, str(tmp_path)
    )
    try:
        os.kill((await lives_of(tmp_path, 1))[0], signal.SIGKILL)
        os.kill((await lives_of(tmp_path, 2))[1], signal.SIGSTOP)
        await lives_of(tmp_path, 3)
        (tmp_path / "end").touch()
        async with asyncio.timeout(LIMIT_S):
            assert await keeper.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
    assert len(await lives_of(tmp_path, 3)) == 3


async def test_in_a_container_a_program_that_hangs_ends_its_first_process(tmp_path: Path) -> None:
    first = await asyncio.create_subprocess_exec(*QUICK_KEEPER, sys.executable, "-c", CHILD, str(tmp_path))
    (pid,) = await lives_of(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        assert await first.wait() == EXIT_HUNG


async def test_a_program_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    keeper = await asyncio.create_subprocess_exec(*KEEPER, "--restart", sys.executable, "-c", "raise SystemExit(3)")
    async with asyncio.timeout(LIMIT_S):
        assert await keeper.wait() == 3


async def test_a_request_to_end_is_passed_on(tmp_path: Path) -> None:
    keeper = await asyncio.create_subprocess_exec(*KEEPER, "--restart", sys.executable, "-c", CHILD, str(tmp_path))
    (pid,) = await lives_of(tmp_path, 1)
    keeper.terminate()
    async with asyncio.timeout(LIMIT_S):
        assert await keeper.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
