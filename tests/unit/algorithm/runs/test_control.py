"""Runs pause at a checkpoint, resume from it, and end when they are cancelled."""

from dataclasses import replace

import pytest

from fulmen.errors import PermissionDenied, TrainingRunExists, TrainingRunStateInvalid
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes
from tests.support.algorithm.run_service import created, until, working


async def test_a_paused_run_has_a_checkpoint_and_resumes(world, grpo_draft, service):
    run = await created(grpo_draft, world)
    # The port call that blocks is where the run waits while it is asked to pause.
    world.crashes = Crashes(at_call=12)
    service.runs.add(run)
    await world.crashes.killed.wait()
    assert service.runs.pause(run.name).state is RunState.RUNNING
    paused = await until(service, run.name, RunState.PAUSED)
    assert list((service.folder.run_files(run).checkpoints).iterdir())
    assert service.runs.pause(run.name) == paused
    assert service.runs.resume(run.name).state is RunState.PENDING
    done = await service.finish(run)
    assert done.state is RunState.SUCCEEDED
    assert done.step == 4


async def test_a_drained_run_stays_running_and_resumes_in_the_next_process(world, grpo_draft, open_service):
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=14)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await world.crashes.killed.wait()
        await service.worker.drain()
        assert service.runs.entry(run.name).run.state is RunState.RUNNING
    world.crashes = Crashes()
    async with working(open_service(world)) as service:
        done = await service.finish(run)
    assert done.state is RunState.SUCCEEDED


async def test_cancelling_ends_a_run_and_its_rollouts(world, grpo_draft, service):
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=12)
    service.runs.add(run)
    await world.crashes.killed.wait()
    assert (await service.worker.cancel(run.name)).state is RunState.CANCELLED
    assert (await service.worker.cancel(run.name)).state is RunState.CANCELLED
    with pytest.raises(TrainingRunStateInvalid):
        service.runs.resume(run.name)
    assert world.cancelled
    assert not world.pending


async def test_a_run_without_usable_rollouts_fails_and_says_why(world, grpo_draft, carry_out):
    world.failure_rate = 1.0
    entry = await carry_out(grpo_draft, state=RunState.FAILED)
    assert "AGENT_ERROR" in entry.run.failure_message


async def test_a_run_whose_first_weights_are_not_there_fails_and_names_the_folder(sft_draft, carry_out, tmp_path):
    policy = replace(sft_draft.policy, source=str(tmp_path / "nothing"))
    entry = await carry_out(replace(sft_draft, policy=policy), state=RunState.FAILED)
    assert str(tmp_path / "nothing") in entry.run.failure_message


@pytest.mark.parametrize("changes", [{"algorithm": "gone"}, {"settings_json": '{"gone": 1}'}])
async def test_a_run_that_this_release_cannot_carry_out_fails_and_leaves_the_others_their_turn(
    world, grpo_draft, sft_draft, service, changes
):
    def refuse() -> None:
        raise PermissionDenied("Not this run.")

    # The one call for a run that cannot begin is to cancel its rollouts.
    world.crashes = Crashes(at_call=1, act=refuse)
    strange = replace(
        await created(replace(grpo_draft, name="projects/default/trainingRuns/strange"), world), **changes
    )
    other = await created(sft_draft, world)
    service.runs.add(strange)
    assert (await service.finish(strange)).state is RunState.FAILED
    assert "Not this run." in service.runs.entry(strange.name).events.notices()[0].message
    service.runs.add(other)
    assert (await service.finish(other)).state is RunState.SUCCEEDED


async def test_sft_trains_and_publishes_without_rollouts(world, sft_draft, carry_out):
    entry = await carry_out(sft_draft)
    losses = [step.values["loss"] for step in entry.events.steps()]
    assert entry.run.policy_version == "resources/policy.tiny/versions/1"
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert not world.groups


async def test_equal_requests_are_one_run_and_different_ones_are_refused(world, sft_draft, open_service):
    service = open_service(world)
    draft = replace(sft_draft, request_id="r1")
    service.runs.add(await created(draft, world))
    assert service.runs.existing([sft_draft]) is not None
    assert service.runs.existing([replace(draft, name="")]) is not None
    assert service.runs.existing([replace(draft, name="projects/default/trainingRuns/other", request_id="")]) is None
    with pytest.raises(TrainingRunExists):
        service.runs.existing([replace(draft, display_name="another")])
    service.close()
