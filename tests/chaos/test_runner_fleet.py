"""Runners are killed, held still, drained and resized under load: every rollout ends exactly once, and nothing stays.

A soak (FULMEN_TEST_SOAK=10) goes through as many seeds; FULMEN_TEST_SEED is the first.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import attempt_pb2, failure_pb2, reward_pb2, rollout_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.processes import none_holds
from tests.support.runner.fleet import Fleet, Watched, create_work, publish_kinds, stored_spans
from tests.support.runner.harness import SIGNING_KEY, token
from tests.support.runner.oracle import Expected, fleet_problems, uncharged
from tests.support.runner.proxy_double import ProxyDouble
from tests.support.runner.stores import RealStore
from tests.support.soak import SOAK, seed

pytestmark = pytest.mark.timeout(900)

SEED = seed(20261122)
RUNNERS = 3
ROLLOUTS = 900 if SOAK > 1 else 260
HARMS = ("kill", "kill", "pause", "drain", "slots") * (3 if SOAK > 1 else 1)
# So many rollouts end between two harms: each comes in the middle of work.
ENDS_BETWEEN = 35
LEASE_TTL_S = 3.0


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields a store with short leases."""
    async with RealStore(database_url, lease_ttl_s=LEASE_TTL_S) as real:
        yield real


@pytest.fixture
async def fleet(store: RealStore, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Yields runners that work."""
    proxy = ProxyDouble(signing_key=SIGNING_KEY)
    await proxy.start()
    settings = {"llm_proxy_url": proxy.url, "llm_proxy_targets": f"127.0.0.1:{proxy.grpc_port}"}
    runners = Fleet(store, tmp_path, count=RUNNERS, settings=settings)
    try:
        await runners.start()
        yield runners
    finally:
        await runners.close()
        await proxy.close()


@pytest.mark.long
@pytest.mark.parametrize("number", range(SEED, SEED + SOAK))
async def test_every_rollout_ends_exactly_once_whatever_happens_to_runners(
    store: RealStore, fleet: Fleet, tmp_path: Path, number: int
) -> None:
    rng = random.Random(number)
    (tmp_path / "ledger").mkdir()
    expected = await create_work(store, await publish_kinds(store), tmp_path, rng, count=ROLLOUTS)
    watched = Watched()
    async with open_channel(store.target, token=token(Role.CLIENT)) as channel:
        following = asyncio.create_task(watched.follow(channel))
        harms = rng.sample(HARMS, len(HARMS))
        for harm in harms:
            await watched.until(min(len(watched.rollouts) + ENDS_BETWEEN, int(ROLLOUTS * 0.8)))
            await fleet.harms[harm](rng.randrange(RUNNERS), rng)
        (tmp_path / "gate").touch()
        await watched.until(ROLLOUTS)
        await fleet.stop()
        following.cancel()
        succeeded = [r.attempts[-1].name for r in watched.rollouts if r.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED]
        spans = await stored_spans(channel, succeeded)
    problems = fleet_problems(watched.rollouts, spans, expected)
    kinds = Counter(
        failure_pb2.FailureKind.Name(attempt.failure_kind).removeprefix("FAILURE_KIND_")
        for rollout in watched.rollouts
        for attempt in rollout.attempts
        if attempt.failure_kind
    )
    print(
        f"seed {number}: {' '.join(harms)}: {len(succeeded)} of {ROLLOUTS} succeeded, attempts that did not: {dict(kinds)}, "
        f"{len(list((tmp_path / 'ledger').glob('*.stopped')))} agents stopped, {len(problems)} problems"
    )
    assert not problems, "\n".join(problems[:20])
    assert kinds["LEASE_LOST"]
    assert sum(map(uncharged, watched.rollouts)) == kinds["RELEASED"]
    await none_holds(fleet.marker)
    assert [path.name for each in tmp_path.glob("work-*") for path in each.iterdir()] == []


def _sound() -> rollout_pb2.Rollout:
    lost = attempt_pb2.Attempt(
        name="projects/default/rollouts/a/attempts/1",
        state=attempt_pb2.ATTEMPT_STATE_FAILED,
        failure_kind=failure_pb2.FAILURE_KIND_LEASE_LOST,
    )
    good = attempt_pb2.Attempt(
        name="projects/default/rollouts/a/attempts/2",
        state=attempt_pb2.ATTEMPT_STATE_SUCCEEDED,
        final=True,
        rewards=[reward_pb2.Reward(dimension="reward", value=2)],
    )
    rollout = rollout_pb2.Rollout(
        name="projects/default/rollouts/a", state=rollout_pb2.ROLLOUT_STATE_SUCCEEDED, attempts=[lost, good]
    )
    rollout.policy.max_attempts = 3
    return rollout


SPANS = {"projects/default/rollouts/a/attempts/2": [("outer", b"1"), ("inner", b"2"), ("other", b"3")]}
EXPECTED = {"projects/default/rollouts/a": Expected(rewards=frozenset({("reward", None)}), spans=("outer", "inner"))}


def test_a_sound_fleet_has_no_problem() -> None:
    assert fleet_problems([_sound()], SPANS, EXPECTED) == []


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda rollout: rollout.attempts.pop(0), "not dense"),
        (lambda rollout: setattr(rollout.attempts[0], "final", True), "are final"),
        (lambda rollout: rollout.attempts[0].rewards.add(value=1), "failed and was scored"),
        (lambda rollout: setattr(rollout.attempts[0], "failure_kind", failure_pb2.FAILURE_KIND_AGENT_ERROR), "AGENT"),
        (lambda rollout: setattr(rollout.attempts[0], "state", attempt_pb2.ATTEMPT_STATE_SUCCEEDED), "does not decide"),
        (lambda rollout: setattr(rollout.attempts[1].rewards[0], "value", 1), "of another attempt"),
        (lambda rollout: rollout.attempts[1].rewards.add(dimension="more", value=2), "has rewards"),
        (lambda rollout: setattr(rollout.policy, "max_attempts", 1), "were charged"),
        (lambda rollout: setattr(rollout, "state", rollout_pb2.ROLLOUT_STATE_FAILED), "failed after 2 of 3"),
        (lambda rollout: setattr(rollout, "state", rollout_pb2.ROLLOUT_STATE_RUNNING), "is ROLLOUT_STATE_RUNNING"),
    ],
)
def test_each_fault_of_a_fleet_is_found(harm: Callable[[rollout_pb2.Rollout], object], says: str) -> None:
    rollout = _sound()
    harm(rollout)
    problems = fleet_problems([rollout], SPANS, EXPECTED)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("times", "spans", "says"),
    [
        (0, SPANS, "never ended"),
        (2, SPANS, "ended 2 times"),
        (1, {}, "has spans"),
        (1, {"projects/default/rollouts/a/attempts/2": [("outer", b"1"), ("inner", b"1")]}, "a span twice"),
    ],
)
def test_each_fault_of_feed_and_spans_is_found(
    times: int, spans: dict[str, list[tuple[str, bytes]]], says: str
) -> None:
    problems = fleet_problems([_sound()] * times, spans, EXPECTED)
    assert any(says in problem for problem in problems), problems
