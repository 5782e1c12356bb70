"""The stages of a training follow each other without a client, each once, wherever the process was killed."""

import random
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.errors import QuotaExceeded, SettingsInvalid, TrainingRunExists, TrainingRunStateInvalid
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import MAX_STAGES
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState, TrainingRun, waiting_again
from fulmen_algorithm.runs.stages import StageNotBegun, continued
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_service_kit.security.auth import set_caller
from fulmen_service_kit.security.tokens import Caller, Role
from tests.support.algorithm.crashes import Crashes
from tests.support.algorithm.model_services import World
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.run_service import (
    ALGORITHMS,
    Service,
    created,
    created_stages,
    live,
    notices,
    service_at,
    with_settings,
    working,
)
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.training import check_books, read_consumed
from tests.support.soak import long_after

RUNS = "projects/default/trainingRuns"
NEWEST = PolicySpec(name="tiny")
Stages = list[TrainingRun]
# What the ports of one service are asked for the leases of two stages: to acquire and to release each.
LEASE_CALLS = 4


@pytest.fixture
def drafts(sft_draft: RunDraft, grpo_draft: RunDraft) -> list[RunDraft]:
    """Returns a training of two stages that end soon."""
    first = replace(with_settings(sft_draft, steps=2), name=f"{RUNS}/imitated")
    second = with_settings(grpo_draft, steps=2, validate_every=1000, validated=False)
    return [first, replace(second, name=f"{RUNS}/reinforced", policy=NEWEST)]


@pytest.fixture
async def stages(drafts: list[RunDraft], world: World) -> Stages:
    return await created_stages(drafts, world)


async def add(service: Service, stages: Stages) -> None:
    await service.ownership.create(*stages)
    for run in stages:
        service.runs.add(run)


def run_of(service: Service, run: TrainingRun) -> TrainingRun:
    return service.runs.entry(run.name).run


def states(service: Service, run: TrainingRun) -> list[RunState]:
    """Returns the states that a run was in, as its events tell."""
    return [event.run.state for event in service.runs.entry(run.name).files.read() if event.run is not None]


def check_done(service: Service, stages: Stages, world: World) -> None:
    """Checks that each of two stages was done once, the second where the first ended."""
    first, second = (run_of(service, run) for run in stages)
    assert [run.name for run in service.runs.newest_first("projects/default")] == sorted(first.stages, reverse=True)
    for run in (first, second):
        # Whatever was killed, a run has begun and ended once.
        assert states(service, run) == [RunState.PENDING, RunState.RUNNING, RunState.SUCCEEDED], notices(
            service.runs.entry(run.name)
        )
    assert second.policy == PolicySpec(name="tiny", origin=PolicyOrigin.VERSION, source=first.policy_version)
    assert first.end_time is not None
    assert second.start_time is not None
    assert first.end_time <= second.start_time
    files = service.folder.run_files(second)
    check_books(read_consumed(files.folder), [group.group_id for group in world.feed], steps=2)


async def test_a_stage_begins_by_itself_where_the_one_before_it_ended(world, stages, service):
    await add(service, stages)
    assert service.runs.waits_for_stage(service.runs.entry(stages[1].name))
    assert (await service.finish(stages[1])).state is RunState.SUCCEEDED
    check_done(service, stages, world)
    assert world.leases.crashes.calls == LEASE_CALLS


@pytest.mark.parametrize("after_effect", [False, True])
@pytest.mark.parametrize("at_call", range(1, LEASE_CALLS + 1))
async def test_a_service_that_is_killed_between_its_stages_neither_loses_nor_doubles_one(
    at_call, after_effect, world, stages, open_service
):
    service = open_service(world)
    await add(service, stages)
    world.leases.crashes = Crashes(at_call=at_call, after_effect=after_effect)
    assert not await live(service, stages[1], world.leases.crashes), "it was killed too late"
    world.leases.crashes = Crashes()
    service = open_service(world)
    assert await live(service, stages[1], Crashes())
    check_done(service, stages, world)


@pytest.mark.parametrize("trial", long_after(3, range(20)))
async def test_a_service_that_is_killed_again_and_again_does_each_stage_once(trial, world, stages, open_service):
    chance = random.Random(trial)
    service = open_service(world)
    await add(service, stages)
    for _ in range(5):
        # A life without a crash makes about 17 calls.
        crashes = Crashes(at_call=chance.randrange(1, 14), after_effect=chance.random() < 0.5)
        world.new_life(crashes)
        if await live(service, stages[1], crashes):
            break
        service = open_service(world)
    else:
        world.new_life(Crashes())
        assert await live(service, stages[1], Crashes())
    check_done(service, stages, world)


async def test_stages_whose_creator_was_killed_before_it_wrote_a_file_are_done(world, stages, open_service):
    service = open_service(world)
    await service.ownership.create(*stages)
    service.close()
    async with working(open_service(world)) as service:
        await service.ownership.learn()
        service.runs.wake()
        assert (await service.finish(stages[1])).state is RunState.SUCCEEDED
        assert run_of(service, stages[1]).policy.source == run_of(service, stages[0]).policy_version


async def test_a_service_begins_the_stage_after_one_that_another_service_did(tmp_path, world, stages):
    first, second = (service_at(tmp_path / name, world, storage=str(tmp_path / "shared")) for name in ("a", "b"))
    world.leases.crashes = Crashes(at_call=2, after_effect=True)
    await add(first, stages)
    killed = world.leases.crashes
    assert not await live(first, stages[1], killed), "it was killed too late"
    world.leases.crashes = Crashes()
    async with working(second):

        async def ended() -> bool:
            await second.ownership.learn()
            second.runs.wake()
            return run_of(second, stages[1]).state.final

        await second.ownership.learn()
        await eventually(ended, what="the other service ends the second stage")
        assert RunFiles(tmp_path / "shared/runs/default/imitated").owner == first.folder.owner
        assert RunFiles(tmp_path / "shared/runs/default/reinforced").owner == second.folder.owner
        check_done(second, stages, world)


@pytest.fixture
async def three(stages: Stages, drafts: list[RunDraft], world: World) -> Stages:
    """Returns a training of three stages, of which the first cannot begin: its weights do not exist."""
    gone = replace(drafts[0].policy, source="/no/such/folder")
    third = replace(drafts[0], name=f"{RUNS}/polished", policy=NEWEST)
    return await created_stages([replace(drafts[0], policy=gone), drafts[1], third], world)


async def test_a_failed_stage_ends_those_after_it_and_they_say_so(three, service):
    await add(service, three)
    last = await service.finish(three[2])
    first, second = (run_of(service, run) for run in three[:2])
    assert [run.state for run in (first, second, last)] == [RunState.FAILED] * 3
    assert second.failure_message == f"The stage before it, {first.name}, is FAILED."
    assert last.failure_message == f"The stage before it, {second.name}, is FAILED."
    assert states(service, second) == [RunState.PENDING, RunState.FAILED]
    assert second.start_time is None


async def test_stages_that_failed_with_one_before_them_follow_it_after_all_once_it_is_rolled_back(
    world, drafts, service
):
    def refuse() -> None:
        raise QuotaExceeded("The project has no room.")

    third = replace(drafts[0], name=f"{RUNS}/polished", policy=NEWEST)
    stages = await created_stages([*drafts, third], world)
    world.crashes = Crashes(at_call=1, act=refuse)
    await add(service, stages)
    assert (await service.finish(stages[2])).state is RunState.FAILED
    failed, name = run_of(service, stages[0]), stages[0].name
    assert (failed.state, failed.failure_message) == (RunState.FAILED, "The project has no room.")

    point = service.folder.run_files(failed).checkpoint_store().listed()[0]
    await service.worker.changed(name, lambda: service.runs.rollback(name, sequence=point.sequence, step=0))

    async def followed() -> bool:
        return run_of(service, stages[2]).state is RunState.SUCCEEDED

    await eventually(followed, what="the last stage succeeds")
    for run in stages[1:]:
        assert states(service, run) == [
            RunState.PENDING, RunState.FAILED, RunState.PENDING, RunState.RUNNING, RunState.SUCCEEDED,
        ]  # fmt: skip
    ended = [run_of(service, run) for run in stages]
    assert [run.failure_message for run in ended] == [""] * 3
    assert ended[1].policy.source == ended[0].policy_version


async def test_a_stage_that_failed_by_itself_or_was_stopped_does_not_wait_again(three, service):
    await add(service, three)
    service.runs.pause(three[1].name)
    assert (await service.finish(three[0])).state is RunState.FAILED
    assert await cancel(service, three[1]) == three[1].name
    await service.worker.changed(three[0].name, lambda: service.runs.rollback(three[0].name, sequence=0, step=0))
    assert not any(service.runs.waits_again(service.runs.entry(run.name)) for run in three)
    for run in (run_of(service, run) for run in three):
        with pytest.raises(TrainingRunStateInvalid):
            waiting_again(run)


async def test_a_stage_that_waits_is_paused_resumed_and_stopped_while_the_one_before_it_runs(world, stages, service):
    world.crashes = Crashes(at_call=1)
    await add(service, stages)
    await world.crashes.killed.wait()
    name = stages[1].name
    assert (await service.worker.changed(name, lambda: service.runs.pause(name))).state is RunState.PAUSED
    assert (await service.worker.changed(name, lambda: service.runs.resume(name))).state is RunState.PENDING
    assert (await service.worker.cancel(name)).state is RunState.CANCELLED
    assert run_of(service, stages[0]).state is RunState.RUNNING


async def test_a_stage_that_does_not_begin_ends_although_no_slot_is_free(world, three, sft_draft, service):
    busy = [
        await created(replace(sft_draft, name=f"{RUNS}/{name}", policy=replace(sft_draft.policy, name=name)), world)
        for name in ("busy", "lively")
    ]
    for run in busy:
        world.child(run.run_id).crashes = Crashes(at_call=1)
    await add(service, three)
    await service.finish(three[0])
    for run in busy:
        service.runs.add(run)
    assert (await service.finish(three[2])).state is RunState.FAILED


async def test_no_stage_begins_after_one_that_is_cancelled(world, stages, service):
    world.crashes = Crashes(at_call=1)
    await add(service, stages)
    await world.crashes.killed.wait()
    await service.worker.cancel(stages[0].name)
    assert (await service.finish(stages[1])).state is RunState.CANCELLED
    assert states(service, stages[1]) == [RunState.PENDING, RunState.CANCELLED]


async def cancel(service: Service, run: TrainingRun) -> str:
    """Cancels a run as a client does; returns the name of the run that was cancelled."""
    servicer = TrainingRunServicer(
        runs=service.runs,
        worker=service.worker,
        connections=service.connections,
        clock=now,
        rules=CreationRules(registry=ALGORITHMS),
        ownership=service.ownership,
        forwarding=Forwarding(None, lambda: ""),
    )
    set_caller(Caller(role=Role.CLIENT))
    context = cast(grpc.aio.ServicerContext, None)
    answer = await servicer.CancelTrainingRun(pb.CancelTrainingRunRequest(name=run.name), context)
    return answer.training_run.name


async def test_who_stops_a_stage_that_has_not_begun_stops_the_one_that_it_waits_for(world, stages, service):
    world.crashes = Crashes(at_call=1)
    await add(service, stages)
    await world.crashes.killed.wait()
    assert await cancel(service, stages[1]) == stages[0].name
    assert (await service.finish(stages[1])).state is RunState.CANCELLED
    assert run_of(service, stages[0]).state is RunState.CANCELLED


async def test_who_stops_a_paused_stage_after_one_that_failed_stops_it(three, service):
    await add(service, three)
    service.runs.pause(three[1].name)
    assert (await service.finish(three[0])).state is RunState.FAILED
    assert await cancel(service, three[1]) == three[1].name
    assert run_of(service, three[1]).state is RunState.CANCELLED
    assert (await service.finish(three[2])).state is RunState.CANCELLED


async def test_who_stops_a_stage_that_has_succeeded_stops_the_one_after_it(world, stages, service):
    reinforced = world.child(stages[1].run_id)
    reinforced.crashes = Crashes(at_call=1)
    await add(service, stages)
    await reinforced.crashes.killed.wait()
    assert await cancel(service, stages[0]) == stages[1].name
    assert [run_of(service, run).state for run in stages] == [RunState.SUCCEEDED, RunState.CANCELLED]
    # There is nothing left to stop.
    assert await cancel(service, stages[0]) == stages[1].name


async def test_a_stage_waits_for_one_that_is_paused(world, stages, service):
    await service.ownership.create(*stages)
    for run in stages:
        service.runs.add(run)
        service.runs.pause(run.name)
    service.runs.resume(stages[1].name)
    assert service.runs.waits_for_stage(service.runs.entry(stages[1].name))
    service.runs.resume(stages[0].name)
    assert (await service.finish(stages[1])).state is RunState.SUCCEEDED
    began = [run_of(service, run).start_time for run in stages]
    assert began == sorted(began)


async def test_a_stage_that_was_rolled_back_does_not_wait_for_the_one_before_it(world, stages, service):
    await add(service, stages)
    await service.finish(stages[1])
    version = run_of(service, stages[0]).policy_version
    for run in reversed(stages):
        first = service.folder.run_files(run).checkpoint_store().listed()[0]
        service.runs.rollback(run.name, sequence=first.sequence, step=int(first.progress["step"]))
    assert not service.runs.waits_for_stage(service.runs.entry(stages[1].name))
    assert (await service.finish(stages[1])).state is RunState.SUCCEEDED
    assert run_of(service, stages[1]).policy.source == version


async def test_a_stage_whose_predecessor_no_longer_exists_fails(world, stages, open_service):
    service = open_service(world)
    await service.ownership.create(*stages)
    del world.leases.rows[stages[0].name]
    async with working(service):
        service.runs.add(stages[1])
        done = await service.finish(stages[1])
    assert done.state is RunState.FAILED
    assert done.failure_message == f"The stage before it, {stages[0].name}, no longer exists."


async def test_all_problems_of_all_stages_are_told_at_once(world, drafts):
    bad = [
        with_settings(drafts[0], stepps=1),
        replace(drafts[1], algorithm="gropo", name=drafts[0].name),
        replace(drafts[0], project="projects/other", name="projects/other/trainingRuns/one"),
        replace(drafts[1], inputs={}, name="", policy=PolicySpec(name="another")),
    ]
    with pytest.raises(SettingsInvalid) as raised:
        await created_stages(bad, world)
    found = {each.field: each.description for each in raised.value.violations}
    assert set(found) == {
        "settings.stepps",
        "next_stages[0].name",
        "next_stages[0].algorithm",
        "next_stages[1].project",
        "next_stages[2].inputs.agent",
        "next_stages[2].inputs.train_tasks",
        # Nothing before it trains that policy.
        "next_stages[2].policy",
    }
    assert found["next_stages[1].project"] == "must be projects/default, the project of the run"


async def test_a_training_has_at_most_sixteen_stages(world, drafts):
    many = [replace(drafts[0], name="") for _ in range(MAX_STAGES + 1)]
    with pytest.raises(SettingsInvalid) as raised:
        await created_stages(many, world)
    assert [each.field for each in raised.value.violations] == ["next_stages"]
    assert len(await created_stages(many[:-1], world)) == MAX_STAGES


async def test_a_repeated_request_finds_its_stages_and_a_different_one_is_refused(world, drafts, stages, open_service):
    service = open_service(world)
    await add(service, stages)
    assert service.runs.existing(drafts) == stages[0]
    for other in (drafts[:1], [drafts[0], with_settings(drafts[1], steps=3)], [replace(drafts[0], name=""), drafts[1]]):
        with pytest.raises(TrainingRunExists):
            service.runs.existing(other)
    with pytest.raises(TrainingRunExists):
        await service.ownership.create(replace(stages[0], name=f"{RUNS}/another"), stages[1])
    assert f"{RUNS}/another" not in world.leases.rows
    service.close()


def made(name: str, **fields: object) -> TrainingRun:
    names = tuple(f"{RUNS}/{each}" for each in ("a", "b", "c"))
    return training_run(name=f"{RUNS}/{name}", state=RunState.SUCCEEDED, stages=names, **fields)


def test_a_stage_continues_with_the_newest_weights_and_the_best_prompt_of_all_stages_before_it():
    trained = made("a", policy_version="resources/policy.tiny/versions/4")
    searched = made("b", prompt_version="resources/prompt.p/versions/2", policy=PolicySpec(name=""))
    waiting = replace(made("c"), inputs={"prompt": "resources/prompt.p/versions/1"}, state=RunState.PENDING)
    begun = continued(waiting, [trained, searched])
    assert begun.policy == PolicySpec(
        name="tiny", origin=PolicyOrigin.VERSION, source="resources/policy.tiny/versions/4"
    )
    assert begun.inputs == {"prompt": "resources/prompt.p/versions/2"}


def test_a_stage_keeps_what_it_names_itself_and_what_no_other_changes():
    trained = made("a", policy_version="resources/policy.tiny/versions/4")
    own = PolicySpec(name="tiny", origin=PolicyOrigin.VERSION, source="resources/policy.tiny/versions/1")
    assert continued(replace(made("b"), policy=own), [trained]).policy == own
    other = PolicySpec(name="another")
    assert continued(replace(made("b"), policy=other), [trained]).policy == other
    searched = replace(trained, prompt_version="resources/prompt.p/versions/2")
    assert "prompt" not in continued(made("b"), [searched]).inputs


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
def test_a_stage_does_not_begin_after_one_that_did_not_succeed(state):
    with pytest.raises(StageNotBegun) as raised:
        continued(made("b"), [replace(made("a"), state=state)])
    assert raised.value.state is state
