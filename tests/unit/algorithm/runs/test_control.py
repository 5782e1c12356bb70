"""Runs are paused at a checkpoint, go on where they were, and end when they are cancelled."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import PermissionDenied, TrainingRunExists, TrainingRunStateInvalid
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import WAIT_S, Service, created, until, working


async def test_a_paused_run_has_a_checkpoint_and_goes_on(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(grpo_draft, world)
    # The port call that blocks is where the run waits while it is asked to pause.
    world.crashes = Crashes(at_call=12)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await world.crashes.killed.wait()
        assert service.runs.pause(run.name).state is RunState.RUNNING
        paused = await until(service, run.name, RunState.PAUSED)
        assert list((service.folder.run_files(run.run_id).checkpoints).iterdir())
        assert service.runs.pause(run.name) == paused
        assert service.runs.resume(run.name).state is RunState.PENDING
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.SUCCEEDED
    assert done.step == 4


async def test_a_drained_run_stays_running_and_goes_on_in_the_next_process(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=14)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await world.crashes.killed.wait()
        await service.worker.drain()
        assert service.runs.entry(run.name).run.state is RunState.RUNNING
    world.crashes = Crashes()
    async with working(open_service(world)) as service:
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.SUCCEEDED


async def test_cancelling_ends_a_run_and_its_rollouts(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=12)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await world.crashes.killed.wait()
        assert (await service.worker.cancel(run.name)).state is RunState.CANCELLED
        assert (await service.worker.cancel(run.name)).state is RunState.CANCELLED
        with pytest.raises(TrainingRunStateInvalid):
            service.runs.resume(run.name)
    assert world.cancelled
    assert not world.pending


async def test_a_run_without_usable_rollouts_fails_and_says_why(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.failure_rate = 1.0
    run = await created(grpo_draft, world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.FAILED
    assert "AGENT_ERROR" in done.failure_message


async def test_a_run_whose_first_weights_are_not_there_fails_and_names_the_folder(
    world: World, sft_draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    policy = replace(sft_draft.policy, source=str(tmp_path / "nothing"))
    run = await created(replace(sft_draft, policy=policy), world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.FAILED
    assert str(tmp_path / "nothing") in done.failure_message


@pytest.mark.parametrize("changes", [{"algorithm": "gone"}, {"settings_json": '{"gone": 1}'}])
async def test_a_run_that_this_release_cannot_carry_out_fails_and_leaves_the_others_their_turn(
    world: World, grpo_draft: RunDraft, sft_draft: RunDraft, open_service: Callable[[World], Service], changes: dict
) -> None:
    def refuse() -> None:
        raise PermissionDenied("Not this run.")

    # The one call for a run that cannot begin is to cancel its rollouts.
    world.crashes = Crashes(at_call=1, act=refuse)
    strange = replace(await created(replace(grpo_draft, name="trainingRuns/strange"), world), **changes)
    other = await created(sft_draft, world)
    async with working(open_service(world)) as service:
        service.runs.add(strange)
        assert (await service.runs.wait_final(strange.name, timeout_s=WAIT_S)).state is RunState.FAILED
        assert "Not this run." in service.runs.entry(strange.name).events.notices()[0].message
        service.runs.add(other)
        assert (await service.runs.wait_final(other.name, timeout_s=WAIT_S)).state is RunState.SUCCEEDED


async def test_sft_trains_and_publishes_without_rollouts(
    world: World, sft_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(sft_draft, world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
        losses = [s.values["loss"] for s in service.runs.entry(run.name).events.steps()]
    assert done.state is RunState.SUCCEEDED
    assert done.policy_version == "resources/policy.tiny/versions/1"
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert not world.groups


async def test_equal_requests_are_one_run_and_different_ones_are_refused(
    world: World, sft_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    service = open_service(world)
    draft = replace(sft_draft, request_id="r1")
    service.runs.add(await created(draft, world))
    assert service.runs.existing(sft_draft) is not None
    assert service.runs.existing(replace(draft, name="")) is not None
    assert service.runs.existing(replace(draft, name="trainingRuns/other", request_id="")) is None
    with pytest.raises(TrainingRunExists):
        service.runs.existing(replace(draft, display_name="another"))
    service.close()
