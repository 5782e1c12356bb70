"""The primary is killed and its synchronous standby promoted: nothing that was acknowledged is lost, or happens twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import FulmenError
from fulmen.store.v1 import lease_pb2, rollout_pb2
from fulmen.store.v1 import lease_service_pb2 as leases
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1.attempt_pb2 import ATTEMPT_STATE_SUCCEEDED
from tests.support.store.running import StoreHandle, Stubs, get, read_feed, results_of, running_store
from tests.support.store.standby import running_pair

LIMIT_S = 90.0
ENOUGH = 40
CLIENTS = 2
FED = ENOUGH // 2
PAUSE_S = 0.05
AT_ONCE = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout() for _ in range(3)])


class Traffic:
    """Clients that create rollouts and runners that end them, and what they were told."""

    def __init__(self) -> None:
        self.created: set[str] = set()
        self.ended: dict[str, str] = {}
        """Attempt that ended each rollout."""
        self._moved = asyncio.Event()

    async def create(self, stubs: Stubs) -> None:
        """Creates rollouts until cancelled."""
        while True:
            try:
                answer = await stubs.rollouts.BatchCreateRollouts(AT_ONCE)
            except FulmenError:
                await asyncio.sleep(PAUSE_S)
            else:
                self.created |= {rollout.name for rollout in answer.rollouts}
                self._move()

    async def work(self, stubs: Stubs) -> None:
        """Takes rollouts and ends them, until cancelled."""
        runner = ""
        while True:
            try:
                answer = await stubs.leases.AcquireLeases(
                    leases.AcquireLeasesRequest(runner=runner, max_count=8, wait=Duration(seconds=1))
                )
            except FulmenError:
                await asyncio.sleep(PAUSE_S)
            else:
                runner = answer.runner
                await self._end(stubs, list(answer.assignments))

    async def _end(self, stubs: Stubs, taken: list[lease_pb2.Assignment]) -> None:
        while taken:
            try:
                answer = await stubs.leases.CompleteAttempts(leases.CompleteAttemptsRequest(results=results_of(taken)))
            except FulmenError:
                await asyncio.sleep(PAUSE_S)
                continue
            for one, ack in zip(taken, answer.acks, strict=True):
                if ack.status in (lease_pb2.COMPLETION_STATUS_APPLIED, lease_pb2.COMPLETION_STATUS_DUPLICATE):
                    self.ended[one.rollout.name] = one.attempt
            self._move()
            return

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def more(self, count: int) -> None:
        """Waits for so many more of each."""
        created, ended = len(self.created) + count, len(self.ended) + count
        async with asyncio.timeout(LIMIT_S):
            while len(self.created) < created or len(self.ended) < ended:
                await self._moved.wait()


@asynccontextmanager
async def traffic_of(store: StoreHandle) -> AsyncIterator[Traffic]:
    """Runs clients and runners."""
    traffic = Traffic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(traffic.create(await store.stubs())) for _ in range(CLIENTS)]
        tasks += [group.create_task(traffic.work(await store.stubs())) for _ in range(CLIENTS)]
        yield traffic
        for task in tasks:
            task.cancel()


async def test_what_was_acknowledged_survives_the_promotion_of_a_synchronous_standby() -> None:
    async with running_pair() as pair, running_store(pair.dsn, lease_ttl_s=60.0) as store:
        stubs = await store.stubs()
        async with traffic_of(store) as traffic:
            await traffic.more(ENOUGH)
            first, cursor = await read_feed(stubs, groups=FED)
            await pair.fail_over()
            await traffic.more(ENOUGH)

        for name in traffic.created:
            rollout = await get(stubs, name)
            if name in traffic.ended:
                assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
                succeeded = [one.name for one in rollout.attempts if one.state == ATTEMPT_STATE_SUCCEEDED]
                assert succeeded == [traffic.ended[name]]
        # The cursor of before the failover goes on where it was.
        later, _ = await read_feed(stubs, groups=len(traffic.ended) - FED, cursor=cursor)
        fed = [group.rollouts[0].name for group in (*first[:FED], *later)]
        assert len(fed) == len(set(fed))
        assert set(fed) >= traffic.ended.keys()
