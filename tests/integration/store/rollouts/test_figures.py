"""Reward, duration, failure, tokens and cost of a rollout: filled with the end of its attempt and the usage of its calls."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PageTokenInvalid
from fulmen.ids import attempt_of
from fulmen.store.v1 import failure_pb2, reward_pb2, rollout_pb2
from fulmen.store.v1 import rollout_selection_pb2 as selection_pb
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from tests.support.store.running import Runner, Stubs, cancel, create, get, pages_of, read_feed

FIGURES = ("reward", "duration", "prompt_token_count", "completion_token_count", "cost_micros")


async def test_the_attempt_that_decides_gives_reward_and_duration(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(max_attempts=2, retry_backoff={"nanos": 1_000_000})
    (name,) = await create(stubs, policy=policy)
    runner = await Runner(stubs).open()
    infra = failure_pb2.FAILURE_KIND_INFRA
    await runner.complete(await runner.take(1), failure_kind=infra, rewards=[reward_pb2.Reward(value=9)])
    waiting = await get(stubs, name)
    assert not any(waiting.HasField(field) for field in FIGURES)
    rewards = [
        reward_pb2.Reward(dimension="style", value=7),
        reward_pb2.Reward(value=5, step=0),
        reward_pb2.Reward(value=4, span_id=b"12345678"),
        reward_pb2.Reward(dimension="reward", value=-0.25),
    ]
    await runner.complete(await runner.take(1), rewards=rewards)
    shown = await get(stubs, name)
    assert shown.reward == -0.25
    taken = shown.attempts[1].end_time.ToNanoseconds() - shown.attempts[1].start_time.ToNanoseconds()
    assert shown.duration.ToNanoseconds() == pytest.approx(taken, abs=1000)
    (listed,) = await _listed(stubs)
    assert (listed.reward, listed.duration) == (shown.reward, shown.duration)
    ((group,), _) = await read_feed(stubs, groups=1)
    assert (group.rollouts[0].reward, group.rollouts[0].duration) == (shown.reward, shown.duration)


async def test_a_reward_of_zero_is_a_reward_and_one_of_another_dimension_is_none(stubs: Stubs) -> None:
    names = await create(stubs, 2)
    runner = await Runner(stubs).open()
    for reward in (reward_pb2.Reward(value=0), reward_pb2.Reward(dimension="style", value=1)):
        await runner.complete(await runner.take(1), rewards=[reward])
    shown = [await get(stubs, name) for name in names]
    assert sorted(each.HasField("reward") for each in shown) == [False, True]
    assert [each.reward for each in await _listed(stubs, filter="reward >= 0")] == [0.0]


async def test_the_failure_of_the_deciding_attempt_is_told_in_one_line(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    message = 'Traceback (most recent call last):\n  File "agent.py", line 1, in solve\nValueError: no\0 answer'
    error = failure_pb2.FAILURE_KIND_AGENT_ERROR
    await runner.complete(await runner.take(1), failure_kind=error, failure_message=message)
    shown = await get(stubs, name)
    assert shown.failure_message == "ValueError: no  answer"
    assert shown.attempts[0].failure_message == message
    assert [each.failure_message for each in await _listed(stubs)] == [shown.failure_message]


async def test_a_rollout_that_no_attempt_decided_has_no_figures(stubs: Stubs) -> None:
    (name,) = await create(stubs, reward=3, prompt_token_count=3, failure_message="mine")
    await cancel(stubs, name)
    shown = await get(stubs, name)
    assert not any(shown.HasField(field) for field in FIGURES)
    assert shown.failure_message == ""


async def test_tokens_and_cost_are_summed_over_attempts_and_models_as_proxies_report_them(stubs: Stubs) -> None:
    used, other = await create(stubs, 2)
    await _use(stubs, 1, (used, 1, "a", 10, 3, 500), (used, 1, "b", 1, 1, 0), (used, 2, "a", 100, 0, 20))
    shown = await get(stubs, used)
    assert (shown.prompt_token_count, shown.completion_token_count, shown.cost_micros) == (111, 4, 520)
    await _use(stubs, 2, (used, 2, "a", 0, 6, 1))
    assert (await get(stubs, used)).completion_token_count == 10
    assert not (await get(stubs, other)).HasField("cost_micros")
    listed = {each.name: each for each in await _listed(stubs)}
    assert (listed[used].completion_token_count, listed[used].cost_micros) == (10, 521)
    assert not listed[other].HasField("cost_micros")


async def test_lists_are_filtered_and_ordered_by_figures(stubs: Stubs) -> None:
    await create(stubs, 3)
    runner = await Runner(stubs).open()
    taken = await runner.take(3)
    for assignment, value in zip(taken, (0.5, 1.0, 0.0), strict=True):
        await runner.complete([assignment], rewards=[reward_pb2.Reward(value=value)])
    (waiting,) = await create(stubs)
    best = taken[1].rollout.name
    await _use(stubs, 1, (best, 1, "a", 1000, 50, 7), (waiting, 1, "a", 30, 60, 7))

    assert [each.name for each in await _listed(stubs, filter="reward > 0.5 AND duration < 1000s")] == [best]
    assert [each.name for each in await _listed(stubs, filter="cost_micros >= 7", order_by="completion_token_count")] == [
        best, waiting,
    ]  # fmt: skip
    assert [each.reward for each in await _listed(stubs, order_by="reward desc")][:3] == [1.0, 0.5, 0.0]
    assert (await _listed(stubs, order_by="reward desc"))[3].name == waiting
    request = pb.ListRolloutsRequest(order_by="reward", page_size=1)
    pages = await pages_of(stubs.rollouts.ListRollouts, request)
    assert [page.rollouts[0].reward for page in pages[:3]] == [0.0, 0.5, 1.0]


async def test_what_is_summed_for_lists_goes_with_the_rollout(stubs: Stubs, connection: Any) -> None:
    (used,) = await create(stubs)
    await _use(stubs, 1, (used, 1, "a", 10, 3, 500), (used, 2, "b", 1, 0, 0))
    rows = await connection.fetch("select token_count, cost_micros from rollout_usage")
    assert [tuple(row) for row in rows] == [(14, 500)]
    assert [each.name for each in await _listed(stubs, filter="token_count = 14", order_by="token_count desc")] == [
        used
    ]
    await cancel(stubs, used)
    await stubs.rollouts.DeleteRollouts(selection_pb.DeleteRolloutsRequest(names=[used]))
    assert not await connection.fetch("select 1 from rollout_usage")
    await _use(stubs, 2, (used, 2, "a", 1, 1, 1))
    assert not await connection.fetch("select 1 from rollout_usage")
    assert await connection.fetchval("select sum(prompt_token_count) from usage_attempt") == 11


async def test_a_page_token_is_bound_to_its_order(stubs: Stubs) -> None:
    await create(stubs, 3)
    token = (await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(order_by="reward", page_size=1))).next_page_token
    assert token
    for other in ("", "reward desc", "duration"):
        with pytest.raises(PageTokenInvalid):
            await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(order_by=other, page_token=token))


async def test_the_problems_of_filter_order_and_page_are_told_together(stubs: Stubs) -> None:
    request = pb.ListRolloutsRequest(filter="reward < much AND duration > 3", order_by="size, state", page_size=-1)
    with pytest.raises(ArgumentInvalid) as caught:
        await stubs.rollouts.ListRollouts(request)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["filter", "filter", "order_by", "order_by", "page_size"]


async def _listed(stubs: Stubs, **request: str) -> list[rollout_pb2.Rollout]:
    return list((await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(**request))).rollouts)


async def _use(stubs: Stubs, sequence: int, *rows: tuple[str, int, str, int, int, int]) -> None:
    deltas = [
        usage_pb.UsageDelta(
            project="projects/default",
            attempt=attempt_of(rollout, number),
            model=model,
            usage=usage_pb.Usage(
                request_count=1, prompt_token_count=prompt, completion_token_count=completion, cost_micros=cost
            ),
        )
        for rollout, number, model, prompt, completion, cost in rows
    ]
    await stubs.usage.SyncUsage(usage_pb.SyncUsageRequest(instance_id="proxy", sequence=sequence, usage=deltas))
