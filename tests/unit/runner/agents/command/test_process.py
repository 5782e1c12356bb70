"""Commands in real processes: what they get, how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fulmen_runner.agents.command.guardian import Guardian, KeptCommand, _start
from fulmen_runner.agents.command.limits import (
    NOTHING,
    Allowance,
    Usage,
    allowance,
    breaches,
    grows_fast,
    measure,
)
from fulmen_runner.agents.command.process import Process, ProcessLimits, ProcessResult, run_process, unconfined
from fulmen_runner.agents.specification import Limits

PATH = {"PATH": os.defpath}


@pytest_asyncio.fixture
async def guardian() -> AsyncIterator[Guardian]:
    guardian = Guardian()
    yield guardian
    await guardian.close()


def limits(allowed: Allowance | None = None) -> ProcessLimits:
    return ProcessLimits(
        stdout_kept_bytes=100,
        stderr_kept_bytes=100,
        output_allowed_bytes=1000,
        allowance=allowed or allowance(),
    )


async def run(
    guardian: Guardian,
    script: str,
    *,
    stdin: bytes = b"",
    environment: Mapping[str, str] = PATH,
    cwd: Path | None = None,
    allowed: Allowance | None = None,
) -> ProcessResult:
    async with asyncio.timeout(60):
        return await run_process(
            unconfined(("/bin/sh", "-c", script, "sh")),
            cwd=cwd,
            environment=environment,
            stdin=stdin,
            limits=limits(allowed),
            guardian=guardian,
        )


async def test_a_command_gets_its_input_environment_and_directory_and_no_other_file(
    guardian: Guardian, tmp_path: Path
) -> None:
    script = 'cat; echo "$WORD"; basename "$PWD"; ls /proc/self/fd | wc -l'
    result = await run(guardian, script, stdin=b"input ", environment={**PATH, "WORD": "ü\udcff"}, cwd=tmp_path)
    # Three and the one by which `ls` reads.
    assert result.stdout == b"input \xc3\xbc\xff\n" + os.fsencode(tmp_path.name) + b"\n4\n"
    assert result.failure == ""


async def test_a_command_has_its_signals_and_is_the_first_to_go_without_memory(guardian: Guardian) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        # The guardian inherits that.
        result = await run(guardian, "grep -E 'Sig(Ign|Blk)' /proc/self/status | cut -f2; cat /proc/self/oom_score_adj")
    finally:
        signal.signal(signal.SIGQUIT, before)
    blocked, ignored, score = result.stdout.split()
    # 32 and 33 belong to the C library; no program may set them.
    assert (int(blocked, 16), int(ignored, 16) & ~(0b11 << 31), score) == (0, 0, b"500")


@pytest.mark.parametrize(
    ("argv", "environment", "error"),
    [
        (("no-such-program",), PATH, FileNotFoundError),
        (("/etc/passwd",), PATH, PermissionError),
        (("echo", "a\0b"), PATH, ValueError),
        (("echo",), {**PATH, "A": "\0"}, ValueError),
        (("echo",), {**PATH, "A=B": ""}, ValueError),
        (("echo", "x" * 3_000_000), PATH, OSError),
    ],
)
async def test_what_cannot_be_started_says_why_and_leaves_no_file_open(
    guardian: Guardian, argv: tuple[str, ...], environment: dict[str, str], error: type[Exception]
) -> None:
    await run(guardian, "exit 0")
    before = open_files()
    with pytest.raises(error):
        await run_process(
            unconfined(argv), cwd=None, environment=environment, stdin=b"", limits=limits(), guardian=guardian
        )
    # Fewer, if something of the first command was closed only now.
    assert open_files() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_command_finds_no_secret_of_the_runner_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_RUNNER_TOKEN", "a secret")
    guardian = Guardian()
    above = "$(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
    names = "tr '\\0' '\\n' | cut -d = -f 1"
    result = await run(guardian, f"cat /proc/$PPID/environ /proc/{above}/environ | {names}")
    await guardian.close()
    assert result.failure == ""
    assert (b"PATH" in result.stdout, b"FULMEN" in result.stdout) == (True, False), result.stdout


async def test_many_at_once_each_have_their_own_end(guardian: Guardian) -> None:
    results = await asyncio.gather(*(run(guardian, f"cat; exit {n}", stdin=str(n).encode()) for n in range(40)))
    assert [(result.exit_code, result.stdout) for result in results] == [(n, str(n).encode()) for n in range(40)]


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_000_000])
async def test_an_input_of_any_size_has_an_end(guardian: Guardian, size: int) -> None:
    counted = await run(guardian, "wc -c", stdin=b"x" * size)
    assert (int(counted.stdout), counted.failure) == (size, "")
    assert (await run(guardian, "exit 0", stdin=b"x" * size)).failure == "", "it need not be read"


class ForkingGuardian(Guardian):
    """Starts commands while something else in this process forks, as an agent inside the runner may."""

    fork = 0

    async def start(self, argv: Sequence[str], **options: Any) -> KeptCommand:
        self.fork = os.fork()
        if not self.fork:
            signal.pause()
            os._exit(0)
        return await super().start(argv, **options)


async def test_an_input_ends_though_a_fork_of_this_process_lives_on() -> None:
    guardian = ForkingGuardian()
    try:
        assert (await run(guardian, "cat", stdin=b"input")).stdout == b"input"
    finally:
        os.kill(guardian.fork, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, guardian.fork, 0)
        await guardian.close()


async def test_a_start_that_is_given_up_keeps_no_socket_for_what_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        starting = asyncio.create_task(_start(ours, b"x" * 10_000_000, []))
        await asyncio.wait({starting}, timeout=0.1)
        starting.cancel()
        await asyncio.wait({starting})
        await until(lambda: ours.fileno() < 0)


async def test_a_cancelled_command_may_say_goodbye_and_is_gone(
    guardian: Guardian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may need longer for a goodbye than a command is given.
    monkeypatch.setattr("fulmen_runner.agents.command.process.TERMINATE_GRACE_S", 50.0)
    script = 'trap "echo bye >bye; exit" TERM; echo $$ >pid.new; mv pid.new pid; while :; do sleep 0.05; done'
    running = asyncio.create_task(run(guardian, script, cwd=tmp_path))
    await until(lambda: (tmp_path / "pid").exists())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "bye").read_text() == "bye\n"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_command_that_is_cancelled_while_it_starts_is_gone_too(guardian: Guardian, tmp_path: Path) -> None:
    await run(guardian, "exit 0")
    for turns in range(12):
        pids = tmp_path / f"{turns}"
        starting = asyncio.create_task(run(guardian, f"echo $$ >{pids}; trap '' TERM; while :; do :; done"))
        for _ in range(turns):
            await asyncio.sleep(0)
        # The loop stands still: if the command was asked for, it starts before the answer is read.
        time.sleep(0.1)  # noqa: ASYNC251
        starting.cancel()
        await asyncio.wait({starting})
        assert not pids.exists() or not Path("/proc", pids.read_text().strip()).exists()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # What another process does rings no bell here.
            await asyncio.sleep(0.01)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_killed_guardian_is_replaced_and_its_commands_continue(guardian: Guardian, tmp_path: Path) -> None:
    running = asyncio.create_task(run(guardian, "touch began; while [ ! -e end ]; do sleep 0.05; done", cwd=tmp_path))
    await until(lambda: (tmp_path / "began").exists())
    keeper_parent = guardian._process
    assert keeper_parent is not None
    keeper_parent.send_signal(signal.SIGKILL)
    keeper_parent.wait(10)
    assert (await run(guardian, "echo 1")).stdout == b"1\n"
    (tmp_path / "end").touch()
    assert (await running).failure == ""


async def test_usage_is_that_of_all_descendants_and_memory_that_they_share_counts_once(guardian: Guardian) -> None:
    script = """import mmap, os, signal, time
shared = mmap.mmap(-1, 40_000_000)
shared.write(b"x" * 40_000_000)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os.setsid()
        sum(shared[0:40_000_000:4096])
        os.write(1, b".")
        signal.pause()
signal.pause()
"""
    # The program that runs these tests: the system's may be another.
    process = await Process.start(
        unconfined((sys.executable, "-c", script)),
        cwd=None, environment=PATH, stdin=0, limits=limits(), guardian=guardian,
    )  # fmt: skip
    try:
        await until(lambda: process.watch.tail(1) == b"...")
        keeper = process.kept.keeper
        usage = measure([keeper])[keeper]
        assert (len(usage.processes), usage.thread_count) == (4, 4)
        assert usage.resident_bytes > 160_000_000
        assert breaches({keeper: Allowance(memory_bytes=140_000_000)}) == {}
        assert "MiB" in breaches({keeper: Allowance(memory_bytes=40_000_000)})[keeper]
        assert "limit of 3 processes" in breaches({keeper: Allowance(process_count=3)})[keeper]
        assert breaches({keeper: Allowance(process_count=4)}) == {}
    finally:
        await process.end()
    assert not any(Path("/proc", str(number)).exists() for number in usage.processes)


@pytest.mark.parametrize(
    ("asked", "configured", "allowed", "source"),
    [
        (0, 0, 0, ""),
        (5, 0, 5, "limits.memory_bytes"),
        (0, 7, 7, "FULMEN_RUNNER_ATTEMPT_MEMORY_BYTES"),
        (5, 7, 5, "limits.memory_bytes"),
        (9, 7, 7, "FULMEN_RUNNER_ATTEMPT_MEMORY_BYTES"),
        (-1, 7, 7, "FULMEN_RUNNER_ATTEMPT_MEMORY_BYTES"),
    ],
)
def test_the_smaller_limit_counts_and_says_whose_it_is(asked: int, configured: int, allowed: int, source: str) -> None:
    found = allowance(Limits(memory_bytes=asked), memory_bytes=configured)
    assert found.memory_bytes == allowed
    assert source in found.memory_source


def usage(threads: int = 0, resident_bytes: int = 0) -> Usage:
    return Usage(processes=(), thread_count=threads, resident_bytes=resident_bytes)


async def test_what_forks_without_end_is_ended_with_all_of_it(guardian: Guardian) -> None:
    # No more than 511, should nothing end it.
    script = "b() { [ $1 -gt 7 ] || { b $(($1 + 1)) & b $(($1 + 1)) & }; sleep 60; }; b 0"
    result = await run(guardian, script, allowed=allowance(Limits(process_count=20)))
    assert "limit of 20 processes and threads (limits.process_count" in result.breach


@pytest.mark.parametrize(
    ("allowed", "before", "now", "fast"),
    [
        (Allowance(process_count=50), NOTHING, usage(7), True),
        (Allowance(process_count=50), NOTHING, usage(6), False),
        (Allowance(process_count=50), usage(40), usage(42), False),
        (Allowance(process_count=4), usage(1), usage(2), False),
        (Allowance(process_count=50), usage(40), usage(10), False),
        (Allowance(process_count=50), NOTHING, usage(0, 1 << 40), False),
        (Allowance(memory_bytes=800), usage(1, 100), usage(1, 200), True),
        (Allowance(memory_bytes=800), usage(1, 100), usage(900, 199), False),
    ],
)
def test_a_command_that_soon_uses_too_much_is_measured_more_often(
    allowed: Allowance, before: Usage, now: Usage, fast: bool
) -> None:
    assert grows_fast(allowed, before, now) is fast
