"""Where captures go: a store that acknowledges and forgets, in a process of its own, or a real one.

`python -m benchmarks.proxy.stores` runs the first and prints its address.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.proxy import processes
from benchmarks.store.stand import Bench, running_store
from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import (
    lease_service_pb2,
    lease_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
)
from tests.support.llm_proxy.fake_store import SIGNING_KEY, FakeStore

FORGET_EVERY_S = 1.0
_ROLLOUTS_PER_REQUEST = 500
_ACQUIRE_WAIT_S = 10
_RENEW_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store that runs, and how to get attempts whose spans it takes; with its database, if it is a real one."""

    target: str
    signing_key: str
    attempts: Callable[[int], Awaitable[list[str]]]
    bench: Bench | None = None


async def _made_up(count: int) -> list[str]:
    return [str(AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=1)) for _ in range(count)]


@asynccontextmanager
async def acknowledging() -> AsyncIterator[Store]:
    """Runs the store that acknowledges and forgets."""
    async with processes.module("stores") as (_, target):
        yield Store(target=target, signing_key=SIGNING_KEY, attempts=_made_up)


@asynccontextmanager
async def real() -> AsyncIterator[Store]:
    """Runs a real store over an embedded PostgreSQL."""
    signing_key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL's own user passes through
        async with running_store(Path(folder), short=True, signing_key=signing_key) as bench:
            runner = _Runner(bench.channel)
            renewing = asyncio.create_task(runner.renew(), name="renew-leases")
            yield Store(target=bench.target, signing_key=signing_key, attempts=runner.attempts, bench=bench)
            renewing.cancel()


class _Runner:
    """Holds the leases of attempts: the key of one that does not run is refused."""

    def __init__(self, channel: FulmenChannel) -> None:
        self._rollouts = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        self._leases = lease_service_pb2_grpc.LeaseServiceStub(channel)
        self._session = ""

    async def attempts(self, count: int) -> list[str]:
        """Makes rollouts and takes their leases; returns the attempts."""
        names: list[str] = []
        while len(names) < count:
            size = min(_ROLLOUTS_PER_REQUEST, count - len(names))
            request = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout()] * size)
            await self._rollouts.BatchCreateRollouts(request)
            acquire = lease_service_pb2.AcquireLeasesRequest(runner=self._session, max_count=size)
            acquire.wait.FromSeconds(_ACQUIRE_WAIT_S)
            answer = await self._leases.AcquireLeases(acquire)
            self._session = answer.runner
            names += [assignment.attempt for assignment in answer.assignments]
        return names

    async def renew(self) -> None:
        """Keeps the leases until it is cancelled."""
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            if self._session:
                await self._leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=self._session))


async def serve() -> None:
    """Acknowledges until it is terminated."""
    async with FakeStore() as store:
        sys.stdout.write(f"{store.target}\n")
        sys.stdout.flush()
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            store.chunks.clear()


if __name__ == "__main__":
    uvloop.run(serve())
