"""Watches whether the event loop answers, and names what blocks it.

A thread asks the loop to run a callback, a few times a second. If that takes longer than the limit, the thread reads the
loop's stack and task, waits until the loop answers, and reports the block. The delay of a probe is what a caller would have
waited at that moment: a block of at least the interval is always found, a shorter one in proportion to its length.
"""

import asyncio
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import structlog
from prometheus_client import Counter, Histogram

LIMIT_S = 0.02
LOG_PAUSE_S = 60.0
MAX_PLACES = 64
MAX_STACK = 12
UNNAMED_TASK = "Task-"
UNKNOWN = "unknown"
# Not of OpenTelemetry, whose histograms cost as much as all the rest of a probe.
LAG = Histogram(
    "loop_lag_seconds",
    "Delay of probes of the event loop.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
BLOCKED = Counter("loop_blocked", "Probes of the event loop that waited longer than 20 ms.", ("cause",))
for _cause in ("computing", "waiting"):
    BLOCKED.labels(_cause)
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
_RUNNER = asyncio.Runner.run.__code__
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A time in which the loop did not answer.

    Attributes:
        place: Innermost function outside libraries, such as `fulmen_store.rollouts.codec:encode`; `unknown` if the loop
            was in none, since the process had no processor or another thread held the interpreter.
        work: Name of the task: an rpc, a background role, or empty.
        stack: Places from the innermost frame outwards.
        seconds: How long the probe waited.
        computing: Whether the loop's thread used the processor for most of that time.
    """

    place: str
    work: str
    stack: tuple[str, ...]
    seconds: float
    computing: bool


class LoopWatchdog:
    """The probes of one event loop, in a thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, interval_s: float, report: Callable[[Block], None] | None = None
    ) -> None:
        """Starts nothing yet; call on the loop's thread.

        Args:
            loop: The loop.
            interval_s: Time between probes, in seconds.
            report: Called in the thread for each block; by default it is logged, at most once a minute for each place.
        """
        self._loop = loop
        self._interval_s = interval_s
        self._loop_thread = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._loop_thread) if sys.platform == "linux" else None
        self._stopping = threading.Event()
        self._report = BlockLog() if report is None else report
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread, without waiting for a block to end."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._probe()
            except RuntimeError:
                return  # the loop is closed

    def _probe(self) -> None:
        answered = threading.Lock()
        answered.acquire()
        started, cpu_s = time.perf_counter(), self._cpu_s()
        self._loop.call_soon_threadsafe(answered.release)
        if answered.acquire(timeout=LIMIT_S):
            LAG.observe(time.perf_counter() - started)
            return
        stack, work = self._stack(), self._work()
        while not answered.acquire(timeout=1.0):
            if self._stopping.is_set():
                return
        seconds = time.perf_counter() - started
        LAG.observe(seconds)
        computing = self._cpu_s() - cpu_s > seconds / 2
        BLOCKED.labels("computing" if computing else "waiting").inc()
        place = next((name for name, is_library in stack if not is_library), UNKNOWN)
        names = tuple(name for name, _ in stack[:MAX_STACK])
        self._report(Block(place=place, work=work, stack=names, seconds=seconds, computing=computing))

    def _cpu_s(self) -> float:
        return 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)

    def _work(self) -> str:
        task = asyncio.current_task(self._loop)
        name = "" if task is None else task.get_name()
        return "" if name.startswith(UNNAMED_TASK) else name[:128]

    def _stack(self) -> list[tuple[str, bool]]:
        """Returns the places of the loop's thread from the innermost, and whether each is of a library."""
        frame = sys._current_frames().get(self._loop_thread)
        return [(_place(each), each.f_code.co_filename.startswith(_LIBRARIES)) for each in _outwards(frame)]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a callback; beyond them is what runs the loop."""
    while frame is not None and frame.f_code is not _RUNNER:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}"


class BlockLog:
    """Logs blocks: the first of a place immediately, then at most one a minute with the number since."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}

    def __call__(self, block: Block) -> None:
        now = time.monotonic()
        key = block.place if block.place in self._logged or len(self._logged) < MAX_PLACES else "others"
        last, more = self._logged.get(key, (-LOG_PAUSE_S, 0))
        if now - last < LOG_PAUSE_S:
            self._logged[key] = last, more + 1
            return
        self._logged[key] = now, 0
        # Neither a place nor computing: the machine had no processor for the process.
        write = _log.warning if block.computing or block.place != UNKNOWN else _log.info
        write(
            "loop_blocked",
            place=block.place,
            work=block.work,
            blocked_s=round(block.seconds, 3),
            computing=block.computing,
            more=more,
            callers=block.stack,
        )
