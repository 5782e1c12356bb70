"""Engines of other machines that take longer for a version than a run waits: they serve the one that they have meanwhile.

Such an engine is given newer versions in the background until it has the newest, without ever being restarted for it: from
difference by difference if that is less than fetching all weights, and otherwise in one step.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Final

import structlog

from fulmen_algorithm.engines.supervisor import EngineSupervisor
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind

LEAST_WAIT_S = 10.0
WAIT_FACTOR: Final = 3.0
"""The run waits so many times as long for an engine of another machine as for the first one, and `LEAST_WAIT_S` at least."""
LONGEST_CHAIN: Final = 16
"""Differences that are fetched one after the other. They take as long as all weights where each changes a sixteenth."""
Swaps = Mapping[int, "asyncio.Task[SwapStats | None]"]
"""The swaps of engines, by place."""

_log = structlog.get_logger()


class Laggards:
    """The engines of one policy that lag behind."""

    def __init__(self, newest: Callable[[], PublishedPolicy | None]) -> None:
        """`newest` returns the version that all should have; None when nothing is served any more."""
        self._newest = newest
        self._recent: deque[PublishedPolicy] = deque(maxlen=LONGEST_CHAIN)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def places(self) -> Set[int]:
        """Their places."""
        return self._tasks.keys()

    def published(self, policy: PublishedPolicy) -> None:
        """Notes a new version."""
        self._recent.append(policy)

    async def wait(self, swaps: Swaps, *, awaited: Set[int]) -> None:
        """Waits for swaps as long as the run does; cancelled, it cancels them all.

        Args:
            swaps: The swaps.
            awaited: Places of engines that are waited for, however long they take.
        """
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        until_s: float | None = None
        pending = {*swaps.values()}
        try:
            while pending:
                left_s = None
                if until_s is not None and pending.isdisjoint(swaps[place] for place in awaited):
                    left_s = until_s - now_s()
                    if left_s <= 0:
                        return
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if until_s is None and any(not each.exception() and each.result() for each in done):
                    until_s = began_s + max(LEAST_WAIT_S, WAIT_FACTOR * (now_s() - began_s))
        except asyncio.CancelledError:
            for swap in pending:
                swap.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            raise

    def leave(
        self, place: int, member: EngineSupervisor, swap: "asyncio.Task[SwapStats | None]", notify: Notify
    ) -> None:
        """Marks an engine as a laggard; its swap to the newest version continues."""
        policy = self._newest()
        assert policy is not None
        text = f"is slow to fetch version {policy.version} and serves an older one meanwhile. The run continues."
        notify("warning", f"The engine of {member.backend} {text}")
        self._tasks[place] = asyncio.create_task(self._catch_up(place, member, swap, policy), name="laggard")

    async def _catch_up(
        self,
        place: int,
        member: EngineSupervisor,
        swap: "asyncio.Task[SwapStats | None]",
        policy: PublishedPolicy,
    ) -> None:
        try:
            stats = await swap
            while stats is not None and (following := self._after(policy)) is not None:
                policy = following
                stats = await member.swap(policy)
            if stats is None:
                member.bring_back_later()
        except Exception as error:  # noqa: BLE001  (any error concerns only this engine)
            _log.error("laggard_failed", backend=member.backend, exc_info=error)
            member.bring_back_later()
        finally:
            del self._tasks[place]

    def _after(self, policy: PublishedPolicy) -> PublishedPolicy | None:
        """Returns the version that an engine with this one is given next; None if it has the newest."""
        newest = self._newest()
        if newest is None or newest.version <= policy.version:
            return None
        chain = [each for each in self._recent if each.version > policy.version]
        is_whole = bool(chain) and chain[-1] == newest and bool(policy.sha256) and chain[0].base_sha256 == policy.sha256
        return chain[0] if is_whole and all(each.kind is WeightsKind.DELTA for each in chain) else newest
