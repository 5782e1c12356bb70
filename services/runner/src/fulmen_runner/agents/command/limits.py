"""Enforces limits of memory and processes for commands, including all descendants. Linux only.

Invariant: one task measures all commands of a runner in one pass over /proc. It uses about 2 % of a processor for a few
hundred idle commands, at most 10 % for any number, and at most 25 % while one grows fast. Memory is proportional
(shared pages count once).

Limits are enforced by measuring, also where control groups keep them in the kernel: few runners may create one. RLIMIT_AS
counts reserved memory that is never touched, which is most of Node's and Java's, and RLIMIT_NPROC counts all processes of
the user.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fulmen_runner.agents.specification import NO_LIMITS, Limits

MEASURE_INTERVAL_S = 0.25
"""Interval between measurements of few commands."""

FIRST_DELAY_S = 0.05
"""Delay of the first measurement of a new command: a command that grows often does so immediately."""

GROWING_INTERVAL_S = 0.01
"""Minimum interval while a command grows fast."""

_FAST = 1 / 8
"""Growth between two measurements, as a share of the limit, that counts as fast."""

LONG_INTERVAL_S = 1.0
"""Interval between slow measurements; longer only to stay within 10 % of a processor."""

_PAUSES_PER_MEASUREMENT = 10
_PAUSES_WHILE_NOTHING_GROWS = 50
_PAUSES_WHILE_GROWING = 3
MAX_FILES = 200_000
"""Files of one attempt; to measure more would take longer than the limit allows."""

_BLOCK_BYTES = 512
_PROC = Path("/proc")
_MIB = 1024 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat after the name in parentheses (proc_pid_stat(5), less three).
_PARENT, _GROUP, _THREADS, _RESIDENT = 1, 2, 17, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Limits of a command, 0 for no limit, and the name of the setting or field of each."""

    memory_bytes: int = 0
    memory_source: str = ""
    process_count: int = 0
    process_source: str = ""
    disk_bytes: int = 0
    disk_source: str = "FULMEN_RUNNER_ATTEMPT_DISK_BYTES"

    @property
    def is_unlimited(self) -> bool:
        """Whether there is no limit."""
        return not (self.memory_bytes or self.process_count or self.disk_bytes)

    @property
    def memory_breach(self) -> str:
        """Description of a memory limit that the kernel has kept."""
        return f"exceeded the memory limit of {_mib(self.memory_bytes)} ({self.memory_source}) and was killed"


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resource usage of a command.

    Attributes:
        processes: Process ids.
        thread_count: Number of threads.
        resident_bytes: Resident memory; shared pages count for each process.
        groups: Process groups led by children of the keeper, whose ids are not reused while the keeper lives.
    """

    processes: tuple[int, ...]
    thread_count: int
    resident_bytes: int
    groups: tuple[int, ...] = ()


NOTHING = Usage(processes=(), thread_count=0, resident_bytes=0)


def grows_fast(allowed: Allowance, before: Usage, now: Usage) -> bool:
    """Returns True if a command may exceed a limit long before the next regular measurement."""
    pairs = (
        (allowed.process_count, now.thread_count - before.thread_count),
        (allowed.memory_bytes, now.resident_bytes - before.resident_bytes),
    )
    return any(limit and grown > 1 and grown >= limit * _FAST for limit, grown in pairs)


def allowance(
    asked: Limits = NO_LIMITS, *, memory_bytes: int = 0, process_count: int = 0, disk_bytes: int = 0
) -> Allowance:
    """Returns the smaller of the agent's and the runner's limits; 0 for no limit."""
    memory, memory_source = _smaller(asked.memory_bytes, memory_bytes, "memory_bytes", "ATTEMPT_MEMORY_BYTES")
    processes, process_source = _smaller(asked.process_count, process_count, "process_count", "ATTEMPT_PROCESSES")
    return Allowance(
        memory_bytes=memory,
        memory_source=memory_source,
        process_count=processes,
        process_source=process_source,
        disk_bytes=disk_bytes,
    )


class LimitEnforcer:
    """Measures commands while there are any with limits."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Allowance, asyncio.Future[str]]] = {}
        self._folders: dict[int, tuple[Path, ...]] = {}
        self._measuring: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    def watch(self, keeper: int, allowed: Allowance) -> asyncio.Future[str]:
        """Watches all descendants of a keeper; the future gets a description of the exceeded limit."""
        breach: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if not allowed.is_unlimited and _PROC.joinpath("self", "stat").exists():
            self._watched[keeper] = allowed, breach
            self._started.set()
            if self._measuring is None or self._measuring.done():
                self._measuring = asyncio.create_task(self._measure(), name="limits")
        return breach

    def watch_folders(self, keeper: int, folders: tuple[Path, ...]) -> None:
        """Counts the files in folders toward the limit of a keeper's descendants, instead of those before."""
        self._folders[keeper] = folders

    def forget(self, keeper: int) -> None:
        """Stops watching a keeper's descendants."""
        self._watched.pop(keeper, None)
        self._folders.pop(keeper, None)

    async def close(self) -> None:
        """Stops measuring."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait((self._measuring,))

    async def _measure(self) -> None:
        loop, before = asyncio.get_running_loop(), dict[int, Usage]()
        await asyncio.sleep(FIRST_DELAY_S)
        while self._watched:
            self._started.clear()
            allowed = {keeper: allowance for keeper, (allowance, _) in self._watched.items()}
            report = partial(self._report, loop)
            usages, took_s = await asyncio.to_thread(_measure_and_kill, allowed, dict(self._folders), report)
            if any(grows_fast(allowed[each], before.get(each, NOTHING), usages[each]) for each in allowed):
                await asyncio.sleep(max(GROWING_INTERVAL_S, _PAUSES_WHILE_GROWING * took_s))
            else:
                await self._pause(took_s)
            before = usages

    def _report(self, loop: asyncio.AbstractEventLoop, exceeded: Mapping[int, str]) -> None:
        # Called before the kill, so that the event loop learns of the breach before the exit.
        loop.call_soon_threadsafe(self._breached, exceeded)

    def _breached(self, exceeded: Mapping[int, str]) -> None:
        for keeper, text in exceeded.items():
            watched = self._watched.get(keeper)
            if watched is not None and not watched[1].done():
                watched[1].set_result(text)

    async def _pause(self, took_s: float) -> None:
        """Waits for the next regular measurement, or the first one of a new command."""
        shortest_s = _PAUSES_PER_MEASUREMENT * took_s
        with suppress(TimeoutError):
            async with asyncio.timeout(regular_pause_s(took_s)):
                await asyncio.sleep(shortest_s)
                await self._started.wait()
                await asyncio.sleep(FIRST_DELAY_S)


def regular_pause_s(took_s: float) -> float:
    """Returns the pause after a measurement that took `took_s` seconds of CPU time, in seconds."""
    idle_pause_s = min(LONG_INTERVAL_S, _PAUSES_WHILE_NOTHING_GROWS * took_s)
    return max(MEASURE_INTERVAL_S, idle_pause_s, _PAUSES_PER_MEASUREMENT * took_s)


def breaches(allowed: Mapping[int, Allowance], folders: Mapping[int, tuple[Path, ...]] | None = None) -> dict[int, str]:
    """Returns descriptions of the exceeded limits by keeper. Blocks."""
    return _check(allowed, folders or {})[1]


def _measure_and_kill(
    allowed: Mapping[int, Allowance],
    folders: Mapping[int, tuple[Path, ...]],
    report: Callable[[Mapping[int, str]], object],
) -> tuple[dict[int, Usage], float]:
    """Reports exceeded limits and kills their commands; returns the usage and the CPU time taken, in seconds."""
    # CPU time, not elapsed time: while thousands of processes fork, this thread mostly waits for a processor.
    begin_s = time.thread_time()
    usages, exceeded = _check(allowed, folders)
    if exceeded:
        report(exceeded)
    for keeper in exceeded:
        for group in usages[keeper].groups:
            # Directly: beside thousands of forking processes, keeper and event loop are slow.
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
    return usages, time.thread_time() - begin_s


def _check(
    allowed: Mapping[int, Allowance], folders: Mapping[int, tuple[Path, ...]]
) -> tuple[dict[int, Usage], dict[int, str]]:
    usages = measure(allowed)
    exceeded: dict[int, str] = {}
    for keeper, usage in usages.items():
        limit = allowed[keeper]
        if limit.process_count and usage.thread_count > limit.process_count:
            exceeded[keeper] = (
                f"exceeded the limit of {limit.process_count} processes and threads ({limit.process_source}) with "
                f"{usage.thread_count} and was killed"
            )
        elif limit.memory_bytes and usage.resident_bytes > limit.memory_bytes:
            # Rare, so it may be expensive.
            taken = sum(_proportional_bytes(process) for process in usage.processes)
            if taken > limit.memory_bytes:
                exceeded[keeper] = (
                    f"exceeded the memory limit of {_mib(limit.memory_bytes)} ({limit.memory_source}) with "
                    f"{_mib(taken)} in {len(usage.processes)} processes and was killed"
                )
        elif limit.disk_bytes and (problem := _disk_problem(folders.get(keeper, ()), limit)):
            exceeded[keeper] = f"{problem} and was killed"
    return usages, exceeded


def measure(keepers: Iterable[int]) -> dict[int, Usage]:
    """Returns the resource usage of each keeper's descendants. Blocks."""
    children: dict[int, list[int]] = {}
    fields_of: dict[int, tuple[int, int, bytes]] = {}
    # No pathlib: this is the inner loop.
    for name in os.listdir(_PROC):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"{_PROC}/{name}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            # It has exited.
            continue
        children.setdefault(int(fields[_PARENT]), []).append(int(name))
        fields_of[int(name)] = int(fields[_THREADS]), int(fields[_RESIDENT]) * _PAGE_BYTES, fields[_GROUP]
    usages = {}
    for keeper in keepers:
        processes: list[int] = []
        todo = list(children.get(keeper, ()))
        while todo:
            process = todo.pop()
            processes.append(process)
            todo += children.get(process, ())
        usages[keeper] = Usage(
            processes=tuple(processes),
            thread_count=sum(fields_of[process][0] for process in processes),
            resident_bytes=sum(fields_of[process][1] for process in processes),
            groups=tuple(child for child in children.get(keeper, ()) if int(fields_of[child][2]) == child),
        )
    return usages


def _disk_problem(folders: Iterable[Path], limit: Allowance) -> str:
    """Returns how the files in folders exceed a limit; empty if they do not. A file with several names counts once."""
    total_bytes, entries, todo = 0, 0, [str(folder) for folder in folders]
    linked: set[int] = set()
    while todo:
        try:
            with os.scandir(todo.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink == 1 or entry.is_dir(follow_symlinks=False) or status.st_ino not in linked:
                        total_bytes += status.st_blocks * _BLOCK_BYTES
                    if status.st_nlink > 1:
                        linked.add(status.st_ino)
                    if entries > MAX_FILES:
                        return f"exceeded the limit of {MAX_FILES} files"
        except OSError:
            # Deleted meanwhile.
            continue
    if total_bytes <= limit.disk_bytes:
        return ""
    return f"exceeded the limit of {_mib(limit.disk_bytes)} of files ({limit.disk_source}) with {_mib(total_bytes)}"


def _proportional_bytes(process: int) -> int:
    try:
        lines = _PROC.joinpath(str(process), "smaps_rollup").read_bytes().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))


def _smaller(asked: int, configured: int, asked_name: str, setting: str) -> tuple[int, str]:
    if asked > 0 and (not configured or asked <= configured):
        return asked, f"limits.{asked_name} of the agent"
    return configured, f"FULMEN_RUNNER_{setting}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"
