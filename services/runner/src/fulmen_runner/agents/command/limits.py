"""Holds commands to what they may use: memory and processes of all their descendants together. Linux only.

Invariant: one task measures for all commands of a runner, in one pass over /proc; it takes at most about a
fiftieth of a processor for a few hundred idle ones, a tenth however many there are, and a quarter while one grows fast. Memory is proportional (pages that processes share are counted once). Measured, not
prevented: a control group would prevent, but few runners may make one; RLIMIT_AS counts what a process reserves and never
touches, which is most of what Node and Java reserve, and RLIMIT_NPROC counts all processes of the user.
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
"""How often a few commands are measured."""

FIRST_LOOK_S = 0.05
"""How soon a command is measured that was just started: many that are to grow begin at once."""

GROWING_INTERVAL_S = 0.01
"""How often commands are measured while one of them grows fast."""

_FAST = 1 / 8
"""The share of what it may use by which a command that grows fast has grown since it was last measured."""

LONG_INTERVAL_S = 1.0
"""Measurements that take long are made this seldom, and still more seldom only to keep to a tenth of a processor."""

_PAUSES_PER_MEASUREMENT = 10
_PAUSES_WHILE_NOTHING_GROWS = 50
_PAUSES_WHILE_GROWING = 3
_PROC = Path("/proc")
_MIB = 1024 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat after the name in parentheses (proc_pid_stat(5), less three).
_PARENT, _GROUP, _THREADS, _RESIDENT = 1, 2, 17, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The most that a command may use; 0 is no limit. The texts say who set it."""

    memory_bytes: int = 0
    memory_source: str = ""
    process_count: int = 0
    process_source: str = ""

    @property
    def is_unlimited(self) -> bool:
        """True if nothing needs to be measured."""
        return not (self.memory_bytes or self.process_count)


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a command uses; `processes` are their numbers, `resident_bytes` counts shared pages for each.

    `groups` are the process groups whose leaders are the keeper's own children: their numbers stay theirs while it lives.
    """

    processes: tuple[int, ...]
    thread_count: int
    resident_bytes: int
    groups: tuple[int, ...] = ()


NOTHING = Usage(processes=(), thread_count=0, resident_bytes=0)


def grows_fast(allowed: Allowance, before: Usage, now: Usage) -> bool:
    """Tells whether a command may exceed a limit long before the next regular measurement."""
    pairs = (
        (allowed.process_count, now.thread_count - before.thread_count),
        (allowed.memory_bytes, now.resident_bytes - before.resident_bytes),
    )
    return any(limit and grown > 1 and grown >= limit * _FAST for limit, grown in pairs)


def allowance(asked: Limits = NO_LIMITS, *, memory_bytes: int = 0, process_count: int = 0) -> Allowance:
    """Returns the smaller of what an agent asks for and what the runner's settings allow; 0 is no limit."""
    memory, memory_source = _smaller(asked.memory_bytes, memory_bytes, "memory_bytes", "ATTEMPT_MEMORY_BYTES")
    processes, process_source = _smaller(asked.process_count, process_count, "process_count", "ATTEMPT_PROCESSES")
    return Allowance(
        memory_bytes=memory, memory_source=memory_source, process_count=processes, process_source=process_source
    )


class LimitKeeper:
    """Measures commands while there are any with limits."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Allowance, asyncio.Future[str]]] = {}
        self._measuring: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    def watch(self, keeper: int, allowed: Allowance) -> asyncio.Future[str]:
        """Watches all descendants of a process; the future gets what they exceeded, for a person."""
        breach: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if not allowed.is_unlimited and _PROC.joinpath("self", "stat").exists():
            self._watched[keeper] = allowed, breach
            self._started.set()
            if self._measuring is None or self._measuring.done():
                self._measuring = asyncio.create_task(self._measure(), name="limits")
        return breach

    def forget(self, keeper: int) -> None:
        """Ends a watch."""
        self._watched.pop(keeper, None)

    async def close(self) -> None:
        """Ends the measuring."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait((self._measuring,))

    async def _measure(self) -> None:
        loop, before = asyncio.get_running_loop(), dict[int, Usage]()
        await asyncio.sleep(FIRST_LOOK_S)
        while self._watched:
            self._started.clear()
            allowed = {keeper: allowance for keeper, (allowance, _) in self._watched.items()}
            usages, took_s = await asyncio.to_thread(_look_and_kill, allowed, partial(self._tell, loop))
            if any(grows_fast(allowed[each], before.get(each, NOTHING), usages[each]) for each in allowed):
                await asyncio.sleep(max(GROWING_INTERVAL_S, _PAUSES_WHILE_GROWING * took_s))
            else:
                await self._pause(took_s)
            before = usages

    def _tell(self, loop: asyncio.AbstractEventLoop, exceeded: Mapping[int, str]) -> None:
        # In a thread, and before the kill: so the loop hears of it before it can hear of the end.
        loop.call_soon_threadsafe(self._breached, exceeded)

    def _breached(self, exceeded: Mapping[int, str]) -> None:
        for keeper, text in exceeded.items():
            watched = self._watched.get(keeper)
            if watched is not None and not watched[1].done():
                watched[1].set_result(text)

    async def _pause(self, took_s: float) -> None:
        """Waits for the next regular measurement, or for the first of a command that is started meanwhile."""
        shortest_s = _PAUSES_PER_MEASUREMENT * took_s
        with suppress(TimeoutError):
            async with asyncio.timeout(regular_pause_s(took_s)):
                await asyncio.sleep(shortest_s)
                await self._started.wait()
                await asyncio.sleep(FIRST_LOOK_S)


def regular_pause_s(took_s: float) -> float:
    """Returns how long to wait after a measurement that took this much of a processor's time, all in seconds."""
    seldom_s = min(LONG_INTERVAL_S, _PAUSES_WHILE_NOTHING_GROWS * took_s)
    return max(MEASURE_INTERVAL_S, seldom_s, _PAUSES_PER_MEASUREMENT * took_s)


def breaches(allowed: Mapping[int, Allowance]) -> dict[int, str]:
    """Returns what is exceeded below each of these processes, for a person. Blocks."""
    return _look(allowed)[1]


def _look_and_kill(
    allowed: Mapping[int, Allowance], tell: Callable[[Mapping[int, str]], object]
) -> tuple[dict[int, Usage], float]:
    """Returns what is used, and how much of a processor's time that took, in seconds; tells what is exceeded."""
    # Not the time that passes: while thousands fork this thread waits for most of it, and must not pause for longer.
    begin_s = time.thread_time()
    usages, exceeded = _look(allowed)
    if exceeded:
        tell(exceeded)
    for keeper in exceeded:
        for group in usages[keeper].groups:
            # At once: beside thousands of processes that fork, keeper and event loop get little time.
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
    return usages, time.thread_time() - begin_s


def _look(allowed: Mapping[int, Allowance]) -> tuple[dict[int, Usage], dict[int, str]]:
    usages = measure(allowed)
    exceeded: dict[int, str] = {}
    for keeper, usage in usages.items():
        limit = allowed[keeper]
        if limit.process_count and usage.thread_count > limit.process_count:
            exceeded[keeper] = (
                f"ran {usage.thread_count} processes and threads at once and was killed; allowed are "
                f"{limit.process_count} ({limit.process_source})"
            )
        elif limit.memory_bytes and usage.resident_bytes > limit.memory_bytes:
            # Seldom, so it may cost more.
            taken = sum(_proportional_bytes(process) for process in usage.processes)
            if taken > limit.memory_bytes:
                exceeded[keeper] = (
                    f"took {_mib(taken)} of memory in {len(usage.processes)} processes and was killed; allowed are "
                    f"{_mib(limit.memory_bytes)} ({limit.memory_source})"
                )
    return usages, exceeded


def measure(keepers: Iterable[int]) -> dict[int, Usage]:
    """Returns what the descendants of each process use. Blocks."""
    children: dict[int, list[int]] = {}
    figures: dict[int, tuple[int, int, bytes]] = {}
    # Not by pathlib: this is the inner loop.
    for name in os.listdir(_PROC):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"{_PROC}/{name}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            # It ended.
            continue
        children.setdefault(int(fields[_PARENT]), []).append(int(name))
        figures[int(name)] = int(fields[_THREADS]), int(fields[_RESIDENT]) * _PAGE_BYTES, fields[_GROUP]
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
            thread_count=sum(figures[process][0] for process in processes),
            resident_bytes=sum(figures[process][1] for process in processes),
            groups=tuple(child for child in children.get(keeper, ()) if int(figures[child][2]) == child),
        )
    return usages


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
