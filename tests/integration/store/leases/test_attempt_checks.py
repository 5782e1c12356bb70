"""How attempts stand, as whoever holds their keys is told."""

from __future__ import annotations

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.ids import DEFAULT_PROJECT, rollout_name, runner_name, uuid7
from fulmen.store.v1 import (
    attempt_pb2,
    failure_pb2,
    lease_pb2,
    lease_service_pb2,
    rollout_pb2,
)
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, cancel, create, create_project

pb = lease_service_pb2
LIVE, ENDED, STALE = pb.ATTEMPT_STATUS_LIVE, pb.ATTEMPT_STATUS_ENDED, pb.ATTEMPT_STATUS_STALE_EPOCH
CANCELLED, NOT_FOUND = pb.ATTEMPT_STATUS_CANCEL_REQUESTED, pb.ATTEMPT_STATUS_NOT_FOUND
AGAIN = rollout_pb2.RolloutPolicy(max_attempts=3, retry_on=[failure_pb2.FAILURE_KIND_INFRA])


async def standings(stubs: Stubs, *asked: tuple[str, int]) -> list[pb.AttemptCheckResult]:
    checks = [pb.AttemptCheck(attempt=attempt, epoch=epoch) for attempt, epoch in asked]
    answer = await stubs.leases.CheckAttempts(pb.CheckAttemptsRequest(attempts=checks))
    return list(answer.results)


async def test_each_attempt_is_answered_by_itself_in_the_order_of_the_request(stubs: Stubs) -> None:
    await create(stubs, 2, mode=rollout_pb2.ROLLOUT_MODE_TEST)
    runner = await Runner(stubs).open()
    running, ended = await runner.take(2)
    (waiting,) = await create(stubs)
    assert await runner.complete([ended]) == [lease_pb2.COMPLETION_STATUS_APPLIED]
    nobodys = f"{rollout_name(DEFAULT_PROJECT, uuid7())}/attempts/1"
    asked = [
        (ended.attempt, 1), (f"{waiting}/attempts/1", 1), (running.attempt, 1), (nobodys, 1), (running.attempt, 0),
        (running.attempt, 2), (f"{running.rollout.name}/attempts/2", 2), (running.attempt, 1),
    ]  # fmt: skip
    answers = await standings(stubs, *asked)
    assert [answer.attempt for answer in answers] == [attempt for attempt, _ in asked]
    assert [answer.status for answer in answers] == [
        ENDED, NOT_FOUND, LIVE, NOT_FOUND, LIVE, STALE, NOT_FOUND, LIVE,
    ]  # fmt: skip
    assert answers[2] == pb.AttemptCheckResult(
        attempt=running.attempt,
        status=LIVE,
        state=attempt_pb2.ATTEMPT_STATE_RUNNING,
        project="projects/default",
        mode=rollout_pb2.ROLLOUT_MODE_TEST,
        current_epoch=1,
    )
    assert (answers[0].state, answers[0].current_epoch) == (attempt_pb2.ATTEMPT_STATE_SUCCEEDED, 0)
    assert answers[3] == pb.AttemptCheckResult(attempt=nobodys, status=NOT_FOUND)


async def test_the_first_attempt_is_stale_as_soon_as_the_second_runs(stubs: Stubs) -> None:
    await create(stubs, policy=AGAIN)
    runner = await Runner(stubs).open()
    (first,) = await runner.take(1)
    await runner.complete([first], failure_kind=failure_pb2.FAILURE_KIND_INFRA)
    (second,) = await runner.take(1)
    old, new = await standings(stubs, (first.attempt, 1), (second.attempt, 2))
    assert (old.status, old.state, old.current_epoch) == (STALE, attempt_pb2.ATTEMPT_STATE_FAILED, 2)
    assert (new.status, new.current_epoch) == (LIVE, 2)
    await runner.complete([second])
    assert [one.status for one in await standings(stubs, (first.attempt, 1), (second.attempt, 2))] == [ENDED, ENDED]


async def test_a_running_attempt_of_a_cancelled_rollout_is_asked_to_stop(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    await cancel(stubs, name)
    (asked,) = await standings(stubs, (held.attempt, 1))
    await runner.complete([held], failure_kind=failure_pb2.FAILURE_KIND_CANCELLED)
    (over,) = await standings(stubs, (held.attempt, 1))
    assert (asked.status, over.status) == (CANCELLED, ENDED)


async def test_a_lease_that_was_given_back_is_over(stubs: Stubs) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    await stubs.leases.ReleaseLeases(pb.ReleaseLeasesRequest(runner=runner_name(runner.session_id)))
    (over,) = await standings(stubs, (held.attempt, 1))
    assert (over.status, over.state) == (ENDED, attempt_pb2.ATTEMPT_STATE_FAILED)


async def test_a_token_of_one_project_learns_nothing_of_the_attempts_of_another(
    store: StoreHandle, stubs: Stubs
) -> None:
    await create_project(stubs, "projects/b")
    (name,) = await create(await store.stubs(role=Role.SERVICE, project="projects/b"))
    await (await Runner(stubs).open()).take(1)
    attempt = f"{name}/attempts/1"
    mine = await store.stubs(role=Role.SERVICE, project="projects/b")
    other = await store.stubs(role=Role.SERVICE, project="projects/default")
    (found,), (hidden,) = await standings(mine, (attempt, 1)), await standings(other, (attempt, 1))
    assert (found.status, found.project) == (LIVE, "projects/b")
    assert hidden == pb.AttemptCheckResult(attempt=attempt, status=NOT_FOUND)


@pytest.mark.parametrize(
    "asked", [[], ["nonsense"], [f"{rollout_name(DEFAULT_PROJECT, uuid7())}/attempts/0"], ["x"] * 1001]
)
async def test_a_malformed_question_is_refused(stubs: Stubs, asked: list[str]) -> None:
    with pytest.raises(ArgumentInvalid):
        await standings(stubs, *((attempt, 1) for attempt in asked))
