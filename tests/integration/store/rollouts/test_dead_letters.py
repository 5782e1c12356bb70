"""Dead rollouts are found by filter and run again, each at most once unless it is named."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import ArgumentInvalid, RolloutStateInvalid
from fulmen.store.v1 import failure_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.rollouts import dead_letters
from tests.support.store.running import Runner, Stubs, cancel, create, get, queue_stats, running_store

AGENT_ERROR = failure_pb2.FAILURE_KIND_AGENT_ERROR
TIMEOUT = failure_pb2.FAILURE_KIND_TIMEOUT


async def test_a_filter_runs_each_dead_rollout_again_at_most_once(stubs: Stubs) -> None:
    errors = await dead(stubs, 3, kind=AGENT_ERROR)
    timeouts = await dead(stubs, 2, kind=TIMEOUT)
    await create(stubs, 1)
    first = await retry(stubs, filter="failure_kind = AGENT_ERROR")
    assert [rollout.metadata["fulmen.retry_of"] for rollout in first.rollouts] == sorted(errors)
    assert not first.has_more
    assert not (await retry(stubs, filter="failure_kind = AGENT_ERROR")).rollouts
    rest = await retry(stubs, filter="*")
    assert [rollout.metadata["fulmen.retry_of"] for rollout in rest.rollouts] == sorted(timeouts)


async def test_a_dead_rollout_may_be_run_again_by_name_as_often_as_is_asked(stubs: Stubs) -> None:
    (name,) = await dead(stubs, 1)
    for _ in range(2):
        (again,) = (await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=[name]))).rollouts
        assert again.metadata["fulmen.retry_of"] == name
    assert not (await retry(stubs, filter="*")).rollouts


async def test_what_runs_again_keeps_its_demands_and_is_a_group_of_its_own(stubs: Stubs) -> None:
    fields = {
        "input": b"x",
        "priority": 7,
        "required_labels": {"gpu": "h200"},
        "policy": {"max_attempts": 4, "retry_on": [TIMEOUT], "hedged": True, "attempt_timeout": {"seconds": 5}},
        "task_type": "long",
        "group_id": "g",
        "group_size": 1,
        "training_run": "projects/default/trainingRuns/a",
        "metadata": {str(number): "x" for number in range(32)},
    }
    (name,) = await dead(stubs, 1, labels={"gpu": "h200"}, **fields)
    (again,) = (await retry(stubs, filter="task_type = long", training_run="projects/default/trainingRuns/a")).rollouts
    before, after = await get(stubs, name), await get(stubs, again.name)
    for field in ("input", "priority", "required_labels", "policy", "task_type", "training_run", "mode"):
        assert getattr(after, field) == getattr(before, field), field
    assert (after.group_id, after.group_size) == ("", 1)
    assert after.state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_only_dead_rollouts_of_the_named_run_are_run_again(stubs: Stubs) -> None:
    (mine,) = await dead(stubs, 1, training_run="projects/default/trainingRuns/mine")
    await dead(stubs, 1, training_run="projects/default/trainingRuns/other")
    (cancelled,) = await create(stubs, training_run="projects/default/trainingRuns/mine")
    await cancel(stubs, cancelled)
    answer = await retry(stubs, filter="*", training_run="projects/default/trainingRuns/mine")
    assert [rollout.metadata["fulmen.retry_of"] for rollout in answer.rollouts] == [mine]


async def test_a_repeated_retry_returns_the_first_result_and_runs_nothing_again(stubs: Stubs) -> None:
    await dead(stubs, 3)
    first = await retry(stubs, filter="*", request_id="r")
    await dead(stubs, 2, priority=60)
    again = await retry(stubs, filter="*", request_id="r")
    assert [rollout.name for rollout in again.rollouts] == [rollout.name for rollout in first.rollouts]
    assert again.has_more
    assert len((await retry(stubs, filter="*", request_id="s")).rollouts) == 2


async def test_more_is_told_until_all_are_run_again(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_RETRIED", 4)
    names = await dead(stubs, 9)
    seen: list[str] = []
    for more in (True, True, False):
        answer = await retry(stubs, filter="*")
        assert answer.has_more is more
        seen += [rollout.metadata["fulmen.retry_of"] for rollout in answer.rollouts]
    assert seen == sorted(names)


async def test_many_callers_at_several_replicas_run_each_dead_rollout_again_once(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as two:
        replicas = [await one.stubs(), await two.stubs()]
        names = await dead(replicas[0], 30)
        answers = await asyncio.gather(*(retry(replicas[caller % 2], filter="*") for caller in range(6)))
        again = [rollout.metadata["fulmen.retry_of"] for answer in answers for rollout in answer.rollouts]
        assert sorted(again) == sorted(names)


async def test_one_retry_sent_to_two_replicas_at_once_runs_once(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as two:
        replicas = [await one.stubs(), await two.stubs()]
        await dead(replicas[0], 5)
        answers = await asyncio.gather(
            *(retry(replicas[caller % 2], filter="*", request_id="same") for caller in range(6))
        )
        assert len({tuple(rollout.name for rollout in answer.rollouts) for answer in answers}) == 1
        stats = await queue_stats(replicas[0])
        assert stats.queued_count == 5


async def test_a_retry_of_names_and_a_filter_at_once_or_of_neither_is_refused(stubs: Stubs) -> None:
    (name,) = await dead(stubs, 1)
    for request in (
        pb.RetryRolloutsRequest(names=[name], filter="*"),
        pb.RetryRolloutsRequest(),
        pb.RetryRolloutsRequest(filter="state ="),
    ):
        with pytest.raises(ArgumentInvalid):
            await stubs.rollouts.RetryRollouts(request)
    (waiting,) = await create(stubs)
    with pytest.raises(RolloutStateInvalid):
        await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=[waiting]))


async def dead(
    stubs: Stubs, count: int, *, kind: int = AGENT_ERROR, labels: dict[str, str] | None = None, **fields: object
) -> list[str]:
    """Creates rollouts that fail at their first attempt."""
    fields.setdefault("priority", 50)
    names = await create(stubs, count, **fields)
    runner = await Runner(stubs).open(labels=labels)
    taken = await runner.take(count)
    assert sorted(one.rollout.name for one in taken) == sorted(names)
    policy = taken[0].rollout.policy
    await runner.complete(taken, failure_kind=AGENT_ERROR if kind in policy.retry_on else kind)
    runner.stream.cancel()
    return names


async def retry(stubs: Stubs, **request: object) -> pb.RetryRolloutsResponse:
    """Runs dead rollouts again."""
    answer: pb.RetryRolloutsResponse = await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(**request))
    return answer
