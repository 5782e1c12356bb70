"""The engines of one policy: all are targets of its routes, and each is supervised separately.

Invariant: an engine never serves a version under another one's number. One that does not take a new version gets no calls
until it has been restarted with it; the others serve meanwhile, and the run continues.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import structlog

from fulmen_algorithm.engines.laggards import Laggards
from fulmen_algorithm.engines.proxy_admin import PolicyRoutes
from fulmen_algorithm.engines.supervisor import REFUSED_OR_AWAY, EngineSupervisor, log_only
from fulmen_algorithm.policy.engine_settings import MAX_REPLICAS, each_engine
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import EngineCount, Notify, PublishedPolicy, SwapStats

_log = structlog.get_logger()

JOINED_FROM = MAX_REPLICAS
"""First place of engines that are not of the run's settings but have joined."""


class EngineSet:
    """The engines of one policy.

    Attributes:
        members: The engines, by place; `add` and `remove` change them at any time.
        served: The served policy.
        retired: Whether it was retired; it must not serve again.
        handed_over: Whether another service serves the policy; see `EngineSupervisor`.
    """

    def __init__(self, routes: PolicyRoutes) -> None:
        """Creates a set without engines; `routes` are the policy's."""
        self._routes = routes
        self._changing = asyncio.Lock()
        self.members: dict[int, EngineSupervisor] = {}
        self.served: ServedPolicy | None = None
        self.retired = False
        self.handed_over = False
        self._notify: Notify | None = None
        self._laggards = Laggards(lambda: None if self.served is None else self.served.policy)
        self._tokens_of_former = 0

    @property
    def last_used(self) -> float:
        """Time at which one of them was used last, by `time.monotonic`."""
        return max((member.last_used for member in self.members.values()), default=0.0)

    @property
    def own_count(self) -> int:
        """Number of engines that are not of other machines."""
        return sum(place < JOINED_FROM for place in self.members)

    @property
    def readiness(self) -> EngineCount:
        """Number of engines, and of those that take calls."""
        return EngineCount(sum(member.ready for member in self.members.values()), len(self.members))

    @property
    def notify(self) -> Notify:
        """Receives notices about its engines."""
        return log_only if self._notify is None else self._notify

    async def serve(self, served: ServedPolicy, notify: Notify) -> None:
        """Serves a policy version with the engines of its settings, which the set has, and with those that have joined.

        Engines of earlier settings leave once they have no calls. Returns when all others serve, or cannot be started.

        Raises:
            RunFailed: if none can be started with these weights.
        """
        async with self._changing:
            self.served, self._notify, self.handed_over = served, notify, False
            wanted = dict(enumerate(each_engine(served.engine)))
            for place in [place for place in self.members if place < JOINED_FROM and place not in wanted]:
                await self._dismiss(place)
            joined = {p: m.served.engine for p, m in self.members.items() if p not in wanted and m.served is not None}
            starts = [
                self.members[place].serve(replace(served, engine=engine), notify)
                for place, engine in (wanted | joined).items()
            ]
            await self._all_of([self.members[place] for place in wanted | joined], starts)

    async def restore(self, served: ServedPolicy, notify: Notify) -> None:
        """Serves the policy of the previous process, unless a run has served another one meanwhile.

        Raises:
            RunFailed: if no engine can be started with these weights.
        """
        if self.served is None:
            await self.serve(served, notify)

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Replaces the weights of all engines at the same time; each is promoted when it has confirmed.

        Engines that do not take them are restarted with them: in the background if others have taken them. Engines of other
        machines that are slow are left behind; see `laggards`.

        Returns:
            The longest pause of one, and the bytes that all have read.

        Raises:
            RunFailed: if nothing is served, or no engine can be started with these weights.
        """
        async with self._changing:
            if self.served is None:
                raise RunFailed("No policy is served.")
            self.served = replace(self.served, policy=policy)
            self._laggards.published(policy)
            members = {place: each for place, each in self.members.items() if place not in self._laggards.places}
            swaps = {place: asyncio.create_task(member.swap(policy)) for place, member in members.items()}
            await self._laggards.wait(swaps, awaited={place for place in swaps if place < JOINED_FROM})
            for place, swap in swaps.items():
                if not swap.done():
                    self._laggards.leave(place, members[place], swap, self.notify)
            swapped = {place: swap.result() for place, swap in swaps.items() if swap.done()}
            stats = [each for each in swapped.values() if each is not None]
            behind = [members[place] for place, each in swapped.items() if each is None]
            if stats:
                for member in behind:
                    member.bring_back_later()
            else:
                await self._all_of(behind, [member.bring_back() for member in behind])
            return SwapStats(
                pause_s=max((each.pause_s for each in stats), default=0.0),
                size_bytes=sum(each.size_bytes for each in stats),
            )

    async def add(self, place: int, member: EngineSupervisor, served: ServedPolicy, notify: Notify) -> None:
        """Adds an engine while others serve; it gets calls when it has the version of the others.

        Args:
            place: Its place, at least `JOINED_FROM`, which none has.
            member: Its supervisor, which runs.
            served: The policy with the settings of this engine; its version is replaced by the set's.
            notify: Receives notices about it.

        Raises:
            RunFailed: if it cannot be started; it is a member all the same, which the next version or `remove` deals with.
        """
        # Not under the lock: the run's swaps do not wait for it, and it has the newest version when it is there.
        if self.served is not None:
            served = replace(served, policy=self.served.policy)
        self.members[place] = member
        await member.serve(served, notify)

    async def remove(self, place: int) -> None:
        """Removes an engine once it has no calls; others must serve the policy."""
        async with self._changing:
            await self._dismiss(place)

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled by all engines that are and were here."""
        present = await asyncio.gather(*(member.sampled_tokens() for member in self.members.values()))
        return self._tokens_of_former + sum(present)

    def leave(self) -> None:
        """Marks the run as ended; it gets no more notices."""
        for member in self.members.values():
            member.leave()

    def hand_over(self) -> None:
        """Leaves the policy's backends and routes at the proxy to another service; calls in flight end."""
        self.handed_over = True
        for member in self.members.values():
            member.hand_over()

    async def retire(self) -> None:
        """Removes the policy from the proxy and ends all engines; does not wait while the proxy is unavailable."""
        async with self._changing:
            names = () if self.served is None or self.handed_over else self.served.policy.model_names
            self.retired, self.served = True, None
            try:
                for name in reversed(names):
                    try:
                        await self._routes.withdraw(name)
                    except REFUSED_OR_AWAY as error:
                        _log.warning("route_left_behind", model=name, reason=type(error).__name__)
                if names:
                    await asyncio.gather(*(member.unregister() for member in self.members.values()))
            finally:
                await asyncio.gather(*(member.retire() for member in self.members.values()))

    async def _dismiss(self, place: int) -> None:
        member = self.members[place]
        await member.leave_routes()
        try:
            await member.unregister()
            self._tokens_of_former += await member.sampled_tokens()
        finally:
            del self.members[place]
            await member.retire()

    async def _all_of(self, members: Sequence[EngineSupervisor], starts: Sequence[Awaitable[None]]) -> None:
        """Waits for engines to serve. Those that cannot are restarted in the background, if others serve.

        Raises:
            RunFailed: if none serves.
        """
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        failed = [(member, each) for member, each in zip(members, outcomes, strict=True) if each is not None]
        for _, error in failed:
            if not isinstance(error, RunFailed) or len(failed) == len(members):
                raise error
        for member, error in failed:
            assert self._notify is not None
            self._notify("warning", f"One of {len(members)} engines does not serve and is restarted: {error}")
            member.bring_back_later()
