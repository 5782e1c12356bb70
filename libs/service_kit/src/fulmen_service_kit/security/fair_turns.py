"""Fair order between projects: of calls on the event loop, and of resources that few calls may use at the same time,
such as connections.

Both are round robin: a project with a thousand calls waits behind its own, another one's next call comes with the next turn.
Not thread-safe: use them on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any, Final, Generic, TypeVar

from fulmen.errors import QuotaExceeded

RECENT_S: Final = 1.0
"""Time after its last call for which a project counts as one of several."""
LOOP_SHARE: Final = 0.3
"""Share of the loop's time of all projects that have more to do than they may, while others call, too."""
SLOT_LIMIT_S: Final = 10.0
_RETRY_S: Final = 0.5

ItemT = TypeVar("ItemT")


class FairQueue(Generic[ItemT]):
    """A queue with a line for each project; takes from them in turn."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ItemT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the projects that wait, in the order of their turns."""
        return iter(list(self._lines))

    def put(self, project: str, item: ItemT) -> None:
        """Adds an item at the end of a project's line."""
        line = self._lines.get(project)
        if line is None:
            line = self._lines[project] = deque()
        line.append(item)

    def first(self) -> ItemT:
        """Returns the next item, without removing it."""
        return next(iter(self._lines.values()))[0]

    def take(self, project: str = "") -> ItemT:
        """Removes the next item, of one project or of the one whose turn it is; that project then has the last turn."""
        project = project or next(iter(self._lines))
        line = self._lines[project]
        item = line.popleft()
        if line:
            self._lines.move_to_end(project)
        else:
            del self._lines[project]
        return item


class _Waiting(FairQueue[asyncio.Future[None]]):
    """Calls that wait."""

    def join(self, project: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.put(project, future)
        return future

    def wake(self, project: str) -> bool:
        """Wakes the next call of a project that still waits; returns False if there is none."""
        while project in self._lines:
            future = self.take(project)
            if not future.done():
                future.set_result(None)
                return True
        return False


class _Line:
    """The calls of one project that wait for their turn.

    Attributes:
        free_at_s: Time before which none may begin, because the project has used the loop.
        is_armed: Whether `FairTurns` will look at it again.
    """

    __slots__ = ("free_at_s", "is_armed", "waiting")

    def __init__(self) -> None:
        self.free_at_s = 0.0
        self.is_armed = False
        self.waiting: deque[asyncio.Future[None]] = deque()


class FairTurns:
    """Lets one call of each project begin in each turn of the event loop.

    A call that begins immediately does not wait. Calls of a flood wait here, not in the loop, where everything would wait.
    While projects call for which no call waits, those for which some wait get `LOOP_SHARE` of the loop's time together, so
    that the loop is free when a call of the others comes. A project that calls alone does not wait.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._recent = _Recent()
        self._backlogged = 0

    @property
    def is_quiet(self) -> bool:
        """True if at most one project has called within the last second; no call waits then."""
        return len(self._recent) < 2

    async def wait(self, project: str) -> None:
        """Returns when it is the project's turn; the caller bounds the number of calls that wait."""
        loop = asyncio.get_running_loop()
        self._recent.note(project, loop.time())
        line = self._lines.get(project)
        if line is None:
            if self.is_quiet:
                return
            line = self._lines[project] = _Line()
        if not line.is_armed:
            line.is_armed = True
            loop.call_soon(self._next, loop, project, line)
            return
        future: asyncio.Future[None] = loop.create_future()
        if not line.waiting:
            self._backlogged += 1
        line.waiting.append(future)
        await future

    def spend(self, project: str, seconds: float) -> None:
        """Charges a project for time of the loop."""
        line = self._lines.get(project)
        if line is not None and self._backlogged and self._backlogged < len(self._recent):
            now_s = asyncio.get_running_loop().time()
            line.free_at_s = max(now_s, line.free_at_s) + seconds * (self._backlogged / LOOP_SHARE - 1)

    def _next(self, loop: asyncio.AbstractEventLoop, project: str, line: _Line) -> None:
        now_s = loop.time()
        if line.free_at_s > now_s and self._backlogged < len(self._recent):
            loop.call_later(min(line.free_at_s - now_s, RECENT_S), self._next, loop, project, line)
            return
        while line.waiting:
            future = line.waiting.popleft()
            if not line.waiting:
                self._backlogged -= 1
            if not future.done():
                future.set_result(None)
                loop.call_soon(self._next, loop, project, line)
                return
        # What is left of its debt is forgiven: it is at most the time of one call.
        del self._lines[project]


class _Recent:
    """The projects that have called within the last second."""

    __slots__ = ("_times_s",)

    def __init__(self) -> None:
        self._times_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times_s)

    def note(self, project: str, now_s: float) -> None:
        self._times_s[project] = now_s
        self._times_s.move_to_end(project)
        while now_s - next(iter(self._times_s.values())) > RECENT_S:
            self._times_s.popitem(last=False)


class Timed(Generic[ItemT]):
    """An awaitable whose steps on the loop are charged to a project: what it waits for costs nothing."""

    __slots__ = ("_inner", "_spend")

    def __init__(self, inner: Awaitable[ItemT], spend: Callable[[float], None]) -> None:
        """Wraps an awaitable; `spend` is called with the time of each step, in seconds."""
        self._inner, self._spend = inner, spend

    def __await__(self) -> Generator[Any, Any, ItemT]:
        steps = self._inner.__await__()
        step: Callable[[Any], Any] = steps.send
        value: Any = None
        while True:
            begun_s = time.perf_counter()
            try:
                wanted = step(value)
            except StopIteration as done:
                return done.value
            finally:
                self._spend(time.perf_counter() - begun_s)
            try:
                value, step = (yield wanted), steps.send
            except BaseException as error:  # noqa: BLE001  # passed on
                value, step = error, steps.throw


class FairSlots:
    """A number of slots of which no project holds more than its share while others use them, too."""

    def __init__(self, size: int, *, share: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Initializes the slots.

        Args:
            size: Their number.
            share: What one project may hold while others have used some within the last second.
            clock: Monotonic clock, in seconds.
        """
        self._size, self._share = size, share
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._busy = 0
        self._waiting = _Waiting()
        self._recent = _Recent()

    async def take(self, project: str) -> None:
        """Takes a slot; the caller gives it back with `release`.

        Raises:
            QuotaExceeded: If none was free in time.
        """
        self._recent.note(project, self._clock())
        if self._may_hold(project):
            self._hold(project)
        else:
            await self._wait(project)

    async def _wait(self, project: str) -> None:
        woken = self._waiting.join(project)
        try:
            async with asyncio.timeout(SLOT_LIMIT_S):
                await woken
        except BaseException as error:
            if woken.done() and not woken.cancelled():
                # Woken with a slot, and cancelled in the same turn.
                self.release(project)
            if not isinstance(error, TimeoutError):
                raise
            raise QuotaExceeded(
                f"{project} waits for its own calls. Retry after the delay.",
                retry_after_s=_RETRY_S,
                project=project,
                quota="project_slots",
            ) from None

    def _may_hold(self, project: str) -> bool:
        limit = self._size if len(self._recent) < 2 else self._share
        return self._busy < self._size and self._held[project] < limit

    def _hold(self, project: str) -> None:
        self._busy += 1
        self._held[project] += 1

    def release(self, project: str) -> None:
        """Gives a slot back, to the project whose turn it is."""
        self._busy -= 1
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        for waiting in self._waiting:
            if self._may_hold(waiting) and self._waiting.wake(waiting):
                self._hold(waiting)
