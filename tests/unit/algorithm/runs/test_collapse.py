"""A run whose reward collapses goes on from its best checkpoint, so often and no more."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.runs.collapse import RollbackOnCollapse, best_of, collapsed, rewarded
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.checkpoints import Checkpoint
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import WAIT_S, Service, created, working
from tests.support.training import check_books, read_consumed

STEPS = 10
GOOD, BAD = (1.0, 1.0, 0.5), (0.0, 0.0, 0.5)
FIRST_BAD_GROUP = 10


def draft_that_watches(draft: RunDraft, max_rollbacks: int) -> RunDraft:
    """Returns a run that is put back when the mean of two steps falls by 0.3."""
    settings = json.loads(draft.settings_json) | {
        "steps": STEPS,
        "max_staleness": 0,
        "checkpoint_every": 1,
        "validate_every": 100,
        "collapse": {"kind": "rollback", "window": 2, "drop": 0.3, "max_rollbacks": max_rollbacks},
    }
    return replace(draft, settings_json=json.dumps(settings))


def reward(name: str, *, branch: str) -> float:
    """Returns a good reward, but a bad one from some group on in the branches that begin with a text."""
    group, _, member = name.removeprefix("projects/default/rollouts/").rpartition(".")
    index = int(group.rpartition("/")[2])
    bad = "train/" in group and group.startswith(branch) and index >= FIRST_BAD_GROUP
    return (BAD if bad else GOOD)[int(member)]


async def test_a_collapse_puts_the_run_back_to_its_best_checkpoint_and_says_so(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    world.reward_of = lambda name: reward(name, branch="train/")
    run = await created(draft_that_watches(grpo_draft, 2), world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
        events = service.runs.entry(run.name).events
        notices = [notice.message for notice in events.notices()]
    assert done.state is RunState.SUCCEEDED, done.failure_message
    assert (done.step, done.collapses, len(done.branch_points)) == (STEPS, 1, 1)
    story = [text for text in notices if "collapsed" in text or "Rolled back" in text]
    assert len(story) == 2
    assert story[0].startswith("The reward collapsed: 0.5")
    assert story[1].startswith("Rolled back to checkpoint")
    assert "step 5" in story[1], "the last checkpoint before the first bad step is the best"
    steps = events.steps()
    assert [s.step for s in steps] == list(range(STEPS + 1))
    assert steps[-1].values["rollbacks"] == 1
    assert "rollbacks" not in steps[5].values
    lines = read_consumed(tmp_path / "state/runs/small")
    check_books(lines, [g.group_id for g in world.feed], steps=STEPS)
    assert all(line["branch"] == (line["step"] > 5) for line in lines)


async def test_a_run_that_collapses_too_often_fails_and_says_why(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.reward_of = lambda name: reward(name, branch="")
    run = await created(draft_that_watches(grpo_draft, 1), world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.FAILED
    assert done.failure_message.startswith("The reward collapsed")
    assert "rolled back 1 times already" in done.failure_message
    assert done.collapses == 1


@given(st.lists(st.floats(-100, 100), max_size=30), st.integers(1, 6), st.floats(0.1, 50))
def test_a_collapse_is_an_average_that_is_too_far_below_the_best_one(
    rewards: list[float], window: int, drop: float
) -> None:
    progress, settings = Progress(), RollbackOnCollapse(kind="rollback", window=window, drop=drop)
    for value in rewards:
        progress = rewarded(progress, value, window=window)
    averages = [sum(rewards[i : i + window]) / window for i in range(len(rewards) - window + 1)]
    assert collapsed(progress, settings) == (bool(averages) and averages[-1] < max(averages) - drop) or (
        abs(averages[-1] - max(averages) + drop) < 1e-9
    )


def test_the_best_checkpoint_has_seen_enough_steps_and_the_highest_reward() -> None:
    def made(sequence: int, *rewards: float) -> Checkpoint:
        return Checkpoint(path=Path(), sequence=sequence, progress={"rewards": list(rewards)}, size_bytes=0)

    best = best_of([made(1), made(2, 9.0), made(3, 0.5, 0.7), made(4, 0.8, 0.8), made(5, 0.1, 0.2)], window=2)
    assert best is not None
    assert best.sequence == 4
    only = best_of([made(1)], window=2)
    assert only is not None
    assert best_of([], window=2) is None


@pytest.mark.parametrize("bad", [{"drop": 0}, {}, {"drop": 1.0, "windows": 3}])
def test_a_watch_without_a_threshold_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        RollbackOnCollapse.model_validate({"kind": "rollback", **bad})
