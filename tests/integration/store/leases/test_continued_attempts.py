"""The key of an attempt after a lost one says which attempts it continues."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from fulmen.ids import parse_runner_name
from fulmen.store.v1 import failure_pb2, lease_pb2, rollout_pb2
from fulmen_service_kit.security.tokens import TokenVerifier
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns leases that last: sessions expire when a test says so."""
    return {"lease_ttl_s": 3600.0}


class Attempts:
    """Takes attempts of one rollout, and ends them in one way or another."""

    def __init__(self, store: StoreHandle, stubs: Stubs, database_url: str) -> None:
        self.store, self.stubs, self.database_url = store, stubs, database_url

    async def begin(self, **policy: Any) -> None:
        """Creates the rollout."""
        wanted = rollout_pb2.RolloutPolicy(max_attempts=20, **policy)
        wanted.retry_backoff.FromSeconds(0)
        wanted.retry_on.extend([failure_pb2.FAILURE_KIND_LEASE_LOST, failure_pb2.FAILURE_KIND_AGENT_ERROR])
        await create(self.stubs, policy=wanted)

    async def take(self) -> tuple[Runner, lease_pb2.Assignment]:
        """Takes the next attempt, on a runner of its own."""
        runner = await Runner(self.stubs).open()
        (taken,) = await runner.take(1)
        return runner, taken

    async def lose(self, runner: Runner) -> None:
        """Lets the session of a runner expire, as it does when the runner is gone."""
        connection = await asyncpg.connect(self.database_url)
        update = "update runner_session set lease_until = now() - interval '1 second' where id = $1"
        await connection.execute(update, parse_runner_name(runner.opened.runner))
        # As if other attempts had run there: then it is unknown of which one the runner died.
        await connection.execute("update item set runner_losses = 0")
        await connection.close()
        await self.store.parts.roles["lease-sweeper"].sweep_once()


@pytest.fixture
def attempts(store: StoreHandle, stubs: Stubs, database_url: str) -> Attempts:
    """Returns a taker of attempts."""
    return Attempts(store, stubs, database_url)


def continued(assignment: lease_pb2.Assignment) -> int:
    """Returns the first attempt that an attempt may continue; 0 for none."""
    return TokenVerifier(SIGNING_KEY).verify(assignment.attempt_key).terms.continues


async def test_an_attempt_after_lost_ones_continues_the_first_of_them(attempts: Attempts) -> None:
    await attempts.begin()
    runner, taken = await attempts.take()
    assert continued(taken) == 0
    await attempts.lose(runner)
    runner, taken = await attempts.take()
    assert (taken.epoch, continued(taken)) == (2, 1)
    # One that a runner gives back while it drains goes on elsewhere, too.
    await runner.release([taken])
    runner, taken = await attempts.take()
    assert (taken.epoch, continued(taken)) == (3, 1)
    await runner.complete([taken], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
    runner, taken = await attempts.take()
    assert (taken.epoch, continued(taken)) == (4, 0)
    await attempts.lose(runner)
    _, taken = await attempts.take()
    assert (taken.epoch, continued(taken)) == (5, 4)


async def test_a_rollout_may_ask_for_independent_attempts(attempts: Attempts) -> None:
    await attempts.begin(restart_lost=True)
    runner, _ = await attempts.take()
    await attempts.lose(runner)
    _, taken = await attempts.take()
    assert (taken.epoch, continued(taken)) == (2, 0)
