"""Steps that tests of the queue share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.store.v1 import lease_service_pb2
from tests.support.store.running import Runner

__all__ = ["moment", "renewing"]

RENEW_INTERVAL_S = 0.05


def moment(seconds_from_now: float) -> Timestamp:
    """Returns a time relative to now."""
    now = Timestamp()
    now.GetCurrentTime()
    now.FromNanoseconds(now.ToNanoseconds() + round(seconds_from_now * 1e9))
    return now


@asynccontextmanager
async def renewing(runner: Runner) -> AsyncIterator[Runner]:
    """Keeps a runner's session alive, as a runner does that has nothing to report."""

    async def renew() -> None:
        message = lease_service_pb2.StreamLeasesRequest(renew=lease_service_pb2.RenewSession())
        while True:
            await runner.stream.write(message)
            await asyncio.sleep(RENEW_INTERVAL_S)

    task = asyncio.create_task(renew(), name="renewing")
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
