"""A run is rolled back to a checkpoint and resumes: later groups are listed as taken back, and sampled again."""

import json
import random
from dataclasses import replace

import pytest

from fulmen.errors import TrainingRunStateInvalid
from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.rollouts.groups import in_branch, of_branch, stored_train_index
from fulmen_algorithm.runs.progress import IndexSet
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes
from tests.support.algorithm.run_service import (
    checkpoints,
    created,
    kills,
    live,
    rollback,
    run_folder,
    run_journal,
    until,
)
from tests.support.algorithm.training import check_books, read_consumed
from tests.support.soak import long_after


def consumed_up_to(target: Checkpoint) -> set[int]:
    """Returns the groups that the weights of a checkpoint were made with, or that were given up by then."""
    kept = IndexSet(below=target.progress["consumed"]["below"], above=frozenset(target.progress["consumed"]["above"]))
    return {index for index in range(1000) if index in kept}


async def test_a_finished_run_resumes_from_a_checkpoint_with_new_samples(world, grpo_draft, service, tmp_path):
    run = await created(grpo_draft, world)
    service.runs.add(run)
    done = await service.finish(run)
    before = read_consumed(run_folder(tmp_path))
    target = next(each for each in checkpoints(service, run) if each.progress["step"] == 2)
    back = rollback(service, run, target)
    assert (back.state, back.step, back.end_time, len(back.branch_points)) == (RunState.PENDING, 2, None, 1)
    again = await service.finish(run)
    notices = [notice.message for notice in service.runs.entry(run.name).events.notices()]
    assert all(each.progress["branch"] for each in checkpoints(service, run) if each.progress["step"] == 4)
    assert (done.state, again.state, again.step) == (RunState.SUCCEEDED, RunState.SUCCEEDED, 4)
    lines = read_consumed(run_folder(tmp_path))
    check_books(lines, [g.group_id for g in world.feed], steps=4)
    kept = [line for line in before if line["step"] <= 2]
    assert lines[: len(kept)] == kept
    assert all(line["branch"] == 1 for line in lines[len(kept) :])
    rolled_back = (run_journal(tmp_path) / "rolled_back-0001.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in rolled_back] == before[len(kept) :]
    assert any(text.startswith("Rolled back to checkpoint") and "step 2" in text for text in notices)
    published = {name: json.loads(world.requests[key].data) for key, name in world.names.items()}
    first_of_branch = min((name for key, name in world.names.items() if key.startswith("branch-1/")), key=version_of)
    original = f"resources/policy.tiny/versions/{target.progress['policy_version']}"
    assert published[first_of_branch]["parent"] == original
    assert published[first_of_branch]["sha256"] == published[original]["sha256"]
    assert world.served is not None
    assert again.policy_version == world.served.name


def version_of(name: str) -> int:
    return int(name.rpartition("/")[2])


async def test_only_a_paused_or_ended_run_is_rolled_back_and_a_cancelled_one_never(world, grpo_draft, service):
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=16)
    service.runs.add(run)
    await world.crashes.killed.wait()
    first = checkpoints(service, run)[0]
    with pytest.raises(TrainingRunStateInvalid):
        rollback(service, run, first)
    service.runs.pause(run.name)
    await until(service, run.name, RunState.PAUSED)
    rollback(service, run, first)
    with pytest.raises(TrainingRunStateInvalid):
        rollback(service, run, first)
    assert (await service.finish(run)).state is RunState.SUCCEEDED
    other = await created(replace(grpo_draft, name="projects/default/trainingRuns/other"), world)
    world.child("other")
    service.runs.add(other)
    await service.worker.cancel(other.name)
    with pytest.raises(TrainingRunStateInvalid):
        rollback(service, other, first)


async def test_a_run_that_is_rolled_back_to_its_start_starts_over(world, sft_draft, service):
    run = await created(sft_draft, world)
    service.runs.add(run)
    done = await service.finish(run)
    first = service.runs.entry(run.name).events.steps()
    target = checkpoints(service, run)[0]
    rollback(service, run, target)
    assert [s.step for s in service.runs.entry(run.name).events.steps()] == [
        s.step for s in first if s.step <= int(target.progress["step"])
    ]
    again = await service.finish(run)
    assert done.policy_version != again.policy_version
    digests = [json.loads(content.data)["sha256"] for content in world.requests.values()]
    assert len(digests) == 2
    assert len(set(digests)) == 1, "the same demonstrations in the same order give the same weights"


@pytest.mark.parametrize("trial", long_after(1, range(6)))
async def test_a_rollback_that_is_killed_again_and_again_is_the_same_rollback(
    trial, world, grpo_draft, carry_out, open_service, tmp_path
):
    chance = random.Random(trial)
    world.chance = chance
    run = (await carry_out(grpo_draft)).run
    service = open_service(world)
    target = next(each for each in checkpoints(service, run) if each.progress["step"] == 2)
    rollback(service, run, target)
    for crashes in [*kills(chance, calls=12, lives=4), Crashes()]:
        world.new_life(crashes)
        if await live(service, run, crashes):
            break
        service = open_service(world)
    lines = read_consumed(run_folder(tmp_path))
    check_books(lines, [g.group_id for g in world.feed], steps=4)
    assert {line["group"] for line in lines if line["step"] <= 2} == consumed_up_to(target)
    assert {line["branch"] for line in lines if line["step"] > 2} == {1}


def test_ids_of_branches_are_distinguished():
    for branch in (0, 1, 12):
        stored = in_branch("train/7", branch)
        assert of_branch(stored, branch) == "train/7"
        assert stored_train_index(stored) == 7
        assert stored_train_index(in_branch("validation/1/7", branch)) is None
        assert all(of_branch(stored, other) is None for other in (0, 1, 2, 12) if other != branch)
    assert of_branch("branches/1", 0) == "branches/1"
