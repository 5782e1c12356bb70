"""Two sets of rollouts are compared task by task."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PageTokenInvalid
from fulmen.store.v1 import failure_pb2, rollout_pb2
from fulmen.store.v1 import rollout_comparison_pb2 as pb
from tests.support.store.running import Runner, Stubs, create

RUN = "projects/default/trainingRuns/a"
BEFORE = pb.RolloutSide(training_run=RUN, filter="mode = VALIDATION", group_id_prefix="validation/1/")
AFTER = pb.RolloutSide(training_run=RUN, filter="mode = VALIDATION", group_id_prefix="validation/12/")


async def validate(stubs: Stubs, runner: Runner, version: int, rewards: list[float | None]) -> None:
    """Runs one rollout per task; one without a reward fails."""
    for task, reward in enumerate(rewards):
        await create(
            stubs,
            training_run=RUN,
            group_id=f"validation/{version}/{task}",
            mode=rollout_pb2.ROLLOUT_MODE_VALIDATION,
            input=b'{"task": %d}' % task,
        )
        (assignment,) = await runner.take(1)
        if reward is None:
            await runner.complete([assignment], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
        else:
            await runner.complete([assignment], rewards=[{"value": reward}])


async def compare(stubs: Stubs, **fields: Any) -> pb.CompareRolloutsResponse:
    return await stubs.rollouts.CompareRollouts(
        pb.CompareRolloutsRequest(**({"baseline": BEFORE, "candidate": AFTER} | fields))
    )


async def test_wins_losses_and_ties_are_counted_by_task_with_an_interval(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    await validate(stubs, runner, 1, [0.0, 0.5, 1.0, 0.0, None])
    await validate(stubs, runner, 12, [1.0, 1.0, 1.0, None, 0.0])
    found = await compare(stubs)
    assert (found.task_count, found.win_count, found.loss_count, found.tie_count) == (3, 2, 0, 1)
    assert (found.baseline_mean, found.candidate_mean, found.mean_difference) == (0.5, 1.0, 0.5)
    assert found.difference_low == 0.0
    assert found.difference_high == 1.0
    assert found.baseline == pb.SideCounts(scored_count=4, unscored_count=1, unpaired_task_count=1)
    assert found.candidate == pb.SideCounts(scored_count=4, unscored_count=1, unpaired_task_count=1)
    assert [each.input for each in found.pairs] == [b'{"task": 2}', b'{"task": 1}', b'{"task": 0}']
    assert found.pairs[-1].baseline_reward == 0.0
    assert found.pairs[-1].candidate_rollouts[0].startswith("projects/default/rollouts/")
    assert await compare(stubs) == found

    with_failures = await compare(stubs, failure_reward=-1.0)
    assert (with_failures.task_count, with_failures.win_count, with_failures.loss_count) == (5, 3, 1)


async def test_pairs_are_paged_and_a_token_is_of_its_own_comparison(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    await validate(stubs, runner, 1, [0.0, 0.0, 0.0])
    await validate(stubs, runner, 12, [0.3, 0.2, 0.1])
    whole = await compare(stubs)
    first = await compare(stubs, page_size=2)
    rest = await compare(stubs, page_size=2, page_token=first.next_page_token)
    assert [*first.pairs, *rest.pairs] == list(whole.pairs)
    assert not rest.next_page_token
    with pytest.raises(PageTokenInvalid):
        await compare(stubs, candidate=BEFORE, page_token=first.next_page_token)


async def test_without_a_task_in_common_nothing_is_claimed(stubs: Stubs) -> None:
    found = await compare(stubs)
    assert (found.task_count, found.mean_difference) == (0, 0.0)
    assert not found.HasField("difference_low")


async def test_every_problem_of_a_comparison_is_told(stubs: Stubs) -> None:
    side = pb.RolloutSide(filter="mode = NONE", group_id_prefix="x" * 129)
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.rollouts.CompareRollouts(pb.CompareRolloutsRequest(candidate=side))
    fields = [each.field for each in refused.value.violations]
    assert fields == ["baseline", "candidate.group_id_prefix", "candidate.filter"]
