"""The queue: creation is idempotent, cancellation and retry do what they say."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fulmen.errors import (
    ArgumentInvalid,
    PageTokenInvalid,
    PermissionDenied,
    RolloutExists,
    RolloutNotFound,
    RolloutStateInvalid,
)
from fulmen.ids import DEFAULT_PROJECT, parse_rollout_name, rollout_name, uuid7
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, create, create_project, get, until_state


async def test_a_created_rollout_can_be_read_back_with_its_defaults(stubs: Stubs) -> None:
    (name,) = await create(stubs, input=b'{"a": 1}', agent="resources/agent.x/versions/3", priority=7)
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_QUEUED
    assert (rollout.input, rollout.agent, rollout.priority) == (b'{"a": 1}', "resources/agent.x/versions/3", 7)
    assert rollout.project == "projects/default"
    assert rollout.policy.max_attempts == 3
    assert rollout.policy.attempt_timeout.seconds == 900
    assert rollout.HasField("create_time")


async def test_a_repeated_request_id_returns_the_first_result(stubs: Stubs) -> None:
    first = await create(stubs, 5, request_id="run/stage/1")
    again = await create(stubs, 5, request_id="run/stage/1")
    other = await create(stubs, 5, request_id="run/stage/2")
    assert again == first
    assert not set(other) & set(first)
    stats = await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
    assert stats.queued_count == 10


async def test_concurrent_repeats_of_a_request_create_once(stubs: Stubs) -> None:
    results = await asyncio.gather(*(create(stubs, 3, request_id="same") for _ in range(8)))
    assert len({tuple(result) for result in results}) == 1
    stats = await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
    assert stats.queued_count == 3


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


async def test_a_rollout_is_created_with_its_lease_if_a_runner_waits(stubs: Stubs, database_url: str) -> None:
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
        connection = await asyncpg.connect(database_url)
        # Both times are those of the transaction.
        at_once = await connection.fetchval(
            "select a.started_at = r.created_at from rollout r join attempt a on a.rollout_id = r.id where r.id = $1",
            parse_rollout_name(name).rollout_id,
        )
        await connection.close()
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
    stats = await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
    assert stats.queued_count == 0


async def test_a_group_takes_no_more_members_than_its_size_and_no_other_size(stubs: Stubs) -> None:
    await create(stubs, 2, group_id="g", group_size=3)
    with pytest.raises(ArgumentInvalid):
        await create(stubs, 2, group_id="g", group_size=3)
    with pytest.raises(ArgumentInvalid):
        await create(stubs, 1, group_id="g", group_size=4)
    await create(stubs, 1, group_id="g", group_size=3)
    stats = await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
    assert stats.queued_count == 3


async def test_one_bad_caller_in_a_commit_fails_alone(stubs: Stubs) -> None:
    await create(stubs, 1, group_id="full", group_size=1)
    calls = [create(stubs, 1, group_id="full", group_size=1)] + [create(stubs, 2) for _ in range(10)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], ArgumentInvalid)
    assert all(isinstance(result, list) for result in results[1:])


async def test_a_waiting_rollout_is_cancelled_at_once_and_stays_cancelled(stubs: Stubs) -> None:
    names = await create(stubs, 3)
    answer = await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=names))
    assert (answer.cancelled_count, answer.cancelling_count) == (3, 0)
    answer = await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=names))
    assert (answer.cancelled_count, answer.cancelling_count) == (0, 0)
    rollout = await get(stubs, names[0])
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
    assert not rollout.attempts


async def test_a_running_rollout_is_cancelled_when_its_runner_has_stopped_it(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    assignments = await runner.take(1)
    answer = await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[name]))
    assert (answer.cancelled_count, answer.cancelling_count) == (0, 1)
    asked = await runner.expect("cancel")
    assert list(asked.attempts) == [assignments[0].attempt]
    assert (await get(stubs, name)).state == rollout_pb2.ROLLOUT_STATE_RUNNING
    await runner.complete(assignments)
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
    assert len(rollout.attempts) == 1


async def test_cancelling_by_training_run_reaches_only_its_rollouts(stubs: Stubs) -> None:
    await create(stubs, 5, training_run="trainingRuns/a")
    (other,) = await create(stubs, 1, training_run="trainingRuns/b")
    answer = await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(training_run="trainingRuns/a"))
    assert answer.cancelled_count == 5
    assert (await get(stubs, other)).state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_cancelling_with_an_unknown_name_cancels_nothing(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    with pytest.raises(RolloutNotFound):
        await stubs.rollouts.CancelRollouts(
            pb.CancelRolloutsRequest(names=[name, rollout_name(DEFAULT_PROJECT, uuid7())])
        )
    assert (await get(stubs, name)).state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_a_final_rollout_is_run_again_as_a_new_one(stubs: Stubs) -> None:
    (name,) = await create(stubs, input=b"x")
    with pytest.raises(RolloutStateInvalid):
        await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=[name]))
    await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[name]))
    request = pb.RetryRolloutsRequest(names=[name], request_id="again")
    (new,) = (await stubs.rollouts.RetryRollouts(request)).rollouts
    (same,) = (await stubs.rollouts.RetryRollouts(request)).rollouts
    assert new.name == same.name != name
    rollout = await get(stubs, new.name)
    assert rollout.input == b"x"
    assert rollout.metadata["fulmen.retry_of"] == name
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_QUEUED


async def test_lists_page_through_everything_newest_first(stubs: Stubs) -> None:
    names = await create(stubs, 7, training_run="trainingRuns/a")
    await create(stubs, 3)
    listed: list[str] = []
    token = ""
    while True:
        page = await stubs.rollouts.ListRollouts(
            pb.ListRolloutsRequest(training_run="trainingRuns/a", page_size=3, page_token=token)
        )
        listed += [rollout.name for rollout in page.rollouts]
        token = page.next_page_token
        if not token:
            break
    assert listed == sorted(names, reverse=True)
    first = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(page_size=3))
    assert len(first.rollouts) == 3
    with pytest.raises(PageTokenInvalid):
        await stubs.rollouts.ListRollouts(
            pb.ListRolloutsRequest(training_run="trainingRuns/a", page_token=first.next_page_token)
        )


async def test_lists_filter_by_state(stubs: Stubs) -> None:
    names = await create(stubs, 4)
    await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=names[:1]))
    page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(states=[rollout_pb2.ROLLOUT_STATE_CANCELLED]))
    assert [rollout.name for rollout in page.rollouts] == names[:1]


async def test_a_client_reaches_only_its_own_project(store: StoreHandle, stubs: Stubs) -> None:
    (name,) = await create(stubs)
    await create_project(stubs, "projects/other")
    stranger = await store.stubs(role=Role.CLIENT, project="projects/other")
    with pytest.raises(RolloutNotFound):
        await get(stranger, name)
    with pytest.raises(PermissionDenied):
        await create(stranger, project="projects/default")
    (meant,) = await create(stranger)
    assert (await get(stranger, meant)).project == "projects/other"
    with pytest.raises(PermissionDenied):
        await stranger.rollouts.ListRollouts(pb.ListRolloutsRequest(project="projects/default"))
    (own,) = await create(stranger, project="projects/other")
    assert (await get(stranger, own)).project == "projects/other"


async def test_a_rollout_is_not_handed_out_before_its_time(stubs: Stubs) -> None:
    later = rollout_pb2.Rollout()
    later.not_before_time.GetCurrentTime()
    later.not_before_time.seconds += 1
    response = await stubs.rollouts.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=[later]))
    runner = await Runner(stubs).open()
    (now_name,) = await create(stubs)
    first, second = await runner.take(2)
    assert [first.rollout.name, second.rollout.name] == [now_name, response.rollouts[0].name]
    rollout = await until_state(stubs, second.rollout.name, rollout_pb2.ROLLOUT_STATE_RUNNING)
    assert rollout.attempts[0].start_time.ToNanoseconds() >= later.not_before_time.ToNanoseconds()
