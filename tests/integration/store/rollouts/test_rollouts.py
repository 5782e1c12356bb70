"""The queue: creation is idempotent, cancellation and retry do what they say."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fulmen.errors import (
    ArgumentInvalid,
    PageTokenInvalid,
    RolloutExists,
    RolloutNotFound,
)
from fulmen.ids import DEFAULT_PROJECT, parse_rollout_name, rollout_name, uuid7
from fulmen.store.v1 import attempt_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.rollouts import moment
from tests.support.store.running import Runner, Stubs, create, create_project, get, pages_of, queue_stats, until_state


async def test_a_created_rollout_can_be_read_back_with_its_defaults(stubs: Stubs) -> None:
    (name,) = await create(stubs, input=b'{"a": 1}', agent="resources/agent.x/versions/3", priority=7)
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_QUEUED
    assert (rollout.input, rollout.agent, rollout.priority) == (b'{"a": 1}', "resources/agent.x/versions/3", 7)
    assert rollout.project == "projects/default"
    assert rollout.policy.max_attempts == 3
    assert rollout.policy.attempt_timeout.seconds == 900
    assert rollout.HasField("create_time")


async def test_a_rollout_is_read_as_it_was_at_one_moment(stubs: Stubs) -> None:
    """Readers ask while attempts end and rollouts become final."""
    runner = await Runner(stubs).open()
    done = False

    async def read(name: str) -> None:
        while not done:
            rollout = await get(stubs, name)
            names = [attempt.name for attempt in rollout.attempts]
            states = [attempt.state for attempt in rollout.attempts]
            assert len(names) == len(set(names)) == 1
            is_final = rollout.state != rollout_pb2.ROLLOUT_STATE_RUNNING
            assert rollout.attempts[0].final == is_final, rollout
            assert rollout.ended_attempt_count == sum(state != attempt_pb2.ATTEMPT_STATE_RUNNING for state in states)

    for _ in range(20):
        await create(stubs, 8)
        taken = await runner.take(8)
        async with asyncio.TaskGroup() as group:
            for one in taken * 2:
                group.create_task(read(one.rollout.name))
            await asyncio.sleep(0.02)
            await runner.complete(taken)
            done = True
        done = False


async def test_requests_on_a_stream_are_answered_in_their_order(stubs: Stubs) -> None:
    stream = stubs.rollouts.StreamCreateRollouts()
    for number in range(50):
        rollouts = [rollout_pb2.Rollout(input=str(number).encode()) for _ in range(1 + number % 3)]
        await stream.write(pb.StreamCreateRolloutsRequest(rollouts=rollouts))
    await stream.done_writing()
    for number in range(50):
        created = (await stream.read()).rollouts
        assert len(created) == 1 + number % 3
        assert (await get(stubs, created[0].name)).input == str(number).encode()


async def test_a_request_that_fails_ends_its_stream_after_the_answers_before_it(stubs: Stubs) -> None:
    stream = stubs.rollouts.StreamCreateRollouts()
    good = pb.StreamCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout()], request_id="first")
    await stream.write(good)
    await stream.write(pb.StreamCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(priority=1000)]))
    (created,) = (await stream.read()).rollouts
    with pytest.raises(ArgumentInvalid) as caught:
        await stream.read()
    assert [violation.field for violation in caught.value.violations] == ["rollouts[0].priority"]
    again = stubs.rollouts.StreamCreateRollouts()
    await again.write(good)
    assert [rollout.name for rollout in (await again.read()).rollouts] == [created.name]


async def test_a_rollout_is_created_with_its_lease_if_a_runner_waits(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    runner = await Runner(stubs).open()
    await runner.demand(1)
    # The first is found by the dispatcher or in the commit that creates it: after it, the runner is known to wait.
    (first,) = await create(stubs)
    (assignment,) = (await runner.expect("assign")).assignments
    await runner.complete([assignment])
    await runner.demand(1)
    at_once = False
    while not at_once:
        (name,) = await create(stubs)
        (assignment,) = (await runner.expect("assign")).assignments
        assert (assignment.rollout.name, assignment.epoch) == (name, 1)
        await runner.complete([assignment])
        await runner.demand(1)
        # Both times are those of the transaction.
        at_once = await connection.fetchval(
            "select a.started_at = r.created_at from rollout r join attempt a on a.rollout_id = r.id where r.id = $1",
            parse_rollout_name(name).rollout_id,
        )
    assert first != name


async def test_a_supplied_name_makes_creation_idempotent_and_guards_the_content(stubs: Stubs) -> None:
    name = rollout_name(DEFAULT_PROJECT, uuid7())
    assert await create(stubs, name=name, input=b"1") == [name]
    assert await create(stubs, name=name, input=b"1") == [name]
    with pytest.raises(RolloutExists) as caught:
        await create(stubs, name=name, input=b"2")
    assert caught.value.metadata["rollout"] == name


async def test_the_project_of_a_supplied_name_is_that_of_the_rollout(stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    name = rollout_name("projects/a", uuid7())
    with pytest.raises(ArgumentInvalid) as caught:
        await create(stubs, name=name, project="projects/default")
    assert [violation.field for violation in caught.value.violations] == ["rollouts[0].name"]
    assert await create(stubs, name=name) == [name]
    assert (await get(stubs, name)).project == "projects/a"
    with pytest.raises(RolloutExists):
        await create(stubs, name=name.replace("projects/a", "projects/default"))


async def test_every_problem_of_every_rollout_is_told_at_once_and_nothing_is_created(stubs: Stubs) -> None:
    request = pb.BatchCreateRolloutsRequest(
        rollouts=[
            rollout_pb2.Rollout(priority=101, group_size=2),
            rollout_pb2.Rollout(input=b"fine"),
            rollout_pb2.Rollout(
                name="projects/default/rollouts/x",
                agent="y",
                policy=rollout_pb2.RolloutPolicy(max_attempts=101, model_token_budget=-1),
            ),
        ]
    )
    with pytest.raises(ArgumentInvalid) as caught:
        await stubs.rollouts.BatchCreateRollouts(request)
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {
        "rollouts[0].priority",
        "rollouts[0].group_id",
        "rollouts[2].name",
        "rollouts[2].agent",
        "rollouts[2].policy.max_attempts",
        "rollouts[2].policy.model_token_budget",
    }
    stats = await queue_stats(stubs)
    assert stats.queued_count == 0


async def test_a_group_takes_no_more_members_than_its_size_and_no_other_size(stubs: Stubs) -> None:
    await create(stubs, 2, group_id="g", group_size=3)
    with pytest.raises(ArgumentInvalid):
        await create(stubs, 2, group_id="g", group_size=3)
    with pytest.raises(ArgumentInvalid):
        await create(stubs, 1, group_id="g", group_size=4)
    await create(stubs, 1, group_id="g", group_size=3)
    stats = await queue_stats(stubs)
    assert stats.queued_count == 3


async def test_cancelling_by_training_run_reaches_only_its_rollouts(stubs: Stubs) -> None:
    await create(stubs, 5, training_run="projects/default/trainingRuns/a")
    (other,) = await create(stubs, 1, training_run="projects/default/trainingRuns/b")
    answer = await stubs.rollouts.CancelRollouts(
        pb.CancelRolloutsRequest(training_run="projects/default/trainingRuns/a")
    )
    assert answer.cancelled_count == 5
    assert (await get(stubs, other)).state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_cancelling_with_an_unknown_name_cancels_nothing(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    with pytest.raises(RolloutNotFound):
        await stubs.rollouts.CancelRollouts(
            pb.CancelRolloutsRequest(names=[name, rollout_name(DEFAULT_PROJECT, uuid7())])
        )
    assert (await get(stubs, name)).state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_lists_page_through_everything_newest_first(stubs: Stubs) -> None:
    names = await create(stubs, 7, training_run="projects/default/trainingRuns/a")
    await create(stubs, 3)
    request = pb.ListRolloutsRequest(training_run="projects/default/trainingRuns/a", page_size=3)
    pages = await pages_of(stubs.rollouts.ListRollouts, request)
    assert [rollout.name for page in pages for rollout in page.rollouts] == sorted(names, reverse=True)
    first = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(page_size=3))
    assert len(first.rollouts) == 3
    with pytest.raises(PageTokenInvalid):
        await stubs.rollouts.ListRollouts(
            pb.ListRolloutsRequest(training_run="projects/default/trainingRuns/a", page_token=first.next_page_token)
        )


async def test_a_rollout_is_not_handed_out_before_its_time(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    not_before = moment(2)
    (later,) = await create(stubs, not_before_time=not_before)
    (now_name,) = await create(stubs)
    first, second = await runner.take(2)
    assert [first.rollout.name, second.rollout.name] == [now_name, later]
    rollout = await until_state(stubs, second.rollout.name, rollout_pb2.ROLLOUT_STATE_RUNNING)
    assert rollout.attempts[0].start_time.ToNanoseconds() >= not_before.ToNanoseconds()
