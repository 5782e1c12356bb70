"""A run whose reward collapses says so, or resumes from its best checkpoint, up to a limit."""

import random
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.runs.collapse import (
    NoticeCollapse,
    RollbackOnCollapse,
    allowed_fall,
    best_of,
    fall,
    rewarded,
)
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.progress import Progress
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.run_service import notices, run_folder, with_settings
from tests.support.algorithm.training import check_books, read_consumed

STEPS = 10
GOOD, BAD = (1.0, 1.0, 0.5), (0.0, 0.0, 0.5)
FIRST_BAD_GROUP = 10


def draft_that_watches(draft: RunDraft, max_rollbacks: int) -> RunDraft:
    """Returns a run that is rolled back when the mean of two steps falls by 0.3."""
    collapse = {"kind": "rollback", "window": 2, "drop": 0.3, "max_rollbacks": max_rollbacks}
    settings = {"steps": STEPS, "max_staleness": 0, "checkpoint_every": 1, "validate_every": 100}
    return with_settings(draft, collapse=collapse, **settings)


def reward(name: str, *, branch: str) -> float:
    """Returns a good reward, but a bad one from some group on in the branches that begin with a text."""
    group, _, member = name.removeprefix("projects/default/rollouts/").rpartition(".")
    index = int(group.rpartition("/")[2])
    bad = "train/" in group and group.startswith(branch) and index >= FIRST_BAD_GROUP
    return (BAD if bad else GOOD)[int(member)]


async def test_a_collapse_puts_the_run_back_to_its_best_checkpoint_and_says_so(world, grpo_draft, carry_out, tmp_path):
    world.reward_of = lambda name: reward(name, branch="train/")
    entry = await carry_out(draft_that_watches(grpo_draft, 2))
    assert (entry.run.step, entry.run.collapses, len(entry.run.branch_points)) == (STEPS, 1, 1)
    story = [text for text in notices(entry) if "collapsed" in text or "Rolled back" in text]
    assert len(story) == 2
    assert story[0].startswith("The reward collapsed: 0.5")
    assert story[1].startswith("Rolled back to checkpoint")
    assert "step 5" in story[1], "the last checkpoint before the first bad step is the best"
    steps = entry.events.steps()
    assert [s.step for s in steps] == list(range(STEPS + 1))
    assert steps[-1].values["rollbacks"] == 1
    assert "rollbacks" not in steps[5].values
    lines = read_consumed(run_folder(tmp_path))
    check_books(lines, [g.group_id for g in world.feed], steps=STEPS)
    assert all(line["branch"] == (line["step"] > 5) for line in lines)


async def test_a_run_that_collapses_too_often_fails_and_says_why(world, grpo_draft, carry_out):
    world.reward_of = lambda name: reward(name, branch="")
    done = (await carry_out(draft_that_watches(grpo_draft, 1), state=RunState.FAILED)).run
    assert done.failure_message.startswith("The reward collapsed")
    assert "already rolled back 1 times" in done.failure_message
    assert done.collapses == 1


@given(st.lists(st.floats(-100, 100), max_size=30), st.integers(1, 6), st.floats(0.1, 50))
def test_a_collapse_is_an_average_that_is_too_far_below_the_best_one(rewards, window, drop):
    progress, settings = Progress(), RollbackOnCollapse(kind="rollback", window=window, drop=drop)
    for value in rewards:
        progress = rewarded(progress, {"reward_mean": value}, window=window)
    collapsed = fall(progress, window=window) > allowed_fall(progress, settings, groups=1)
    averages = [sum(rewards[i : i + window]) / window for i in range(len(rewards) - window + 1)]
    assert collapsed == (bool(averages) and averages[-1] < max(averages) - drop) or (
        abs(averages[-1] - max(averages) + drop) < 1e-9
    )


def test_the_best_checkpoint_has_seen_enough_steps_and_the_highest_reward():
    def made(sequence: int, *rewards: float) -> Checkpoint:
        return Checkpoint(path=Path(), sequence=sequence, progress={"rewards": list(rewards)}, size_bytes=0)

    best = best_of([made(1), made(2, 9.0), made(3, 0.5, 0.7), made(4, 0.8, 0.8), made(5, 0.1, 0.2)], window=2)
    assert best is not None
    assert best.sequence == 4
    only = best_of([made(1)], window=2)
    assert only is not None
    assert best_of([], window=2) is None


@pytest.mark.parametrize("bad", [{"drop": 0}, {"window": 0}, {"drop": 1.0, "windows": 3}])
def test_a_threshold_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="validation error"):
        RollbackOnCollapse.model_validate({"kind": "rollback", **bad})


def falls(
    chances: list[float], *, groups: int = 8, size: int = 8, seed: int = 0, unit: float = 1.0, start: float = 0.0
) -> list[int]:
    """Returns the steps after which a run counts as collapsed; rewards are `start` or `start + unit` by a chance."""
    chance, progress, settings, found = random.Random(seed), Progress(), NoticeCollapse(), []
    for step, each in enumerate(chances):
        rewards = [start + unit * (chance.random() < each) for _ in range(groups * size)]
        metrics = {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}
        progress = rewarded(progress, metrics, window=settings.window)
        if fall(progress, window=settings.window) > allowed_fall(progress, settings, groups=groups):
            found.append(step)
    return found


RISE_AND_FALL = [*([0.37] * 5), *([0.47] * 6), *([0.04] * 8)]


@pytest.mark.parametrize(("unit", "start"), [(1.0, 0.0), (1000.0, 0.0), (0.01, -5.0)])
def test_a_fall_to_nothing_is_noticed_within_the_window_whatever_the_unit_of_the_reward(unit, start):
    noticed = [falls(RISE_AND_FALL, seed=seed, unit=unit, start=start) for seed in range(20)]
    assert all(first[0] in range(12, 16) for first in noticed)


@pytest.mark.parametrize("groups", [2, 8, 32])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.95])
def test_a_reward_that_only_varies_is_no_collapse(chance, groups):
    assert not any(falls([chance] * 200, groups=groups, seed=seed) for seed in range(20))


def test_a_policy_that_has_learned_all_and_fails_now_and_then_has_not_collapsed():
    assert not falls([0.3] * 5 + [0.99] * 50 + [0.93] * 20)


async def test_a_collapse_is_told_once_with_the_remedy_and_again_after_it_has_recovered(world, grpo_draft, carry_out):
    def of_step(name: str) -> float:
        group, _, member = name.partition("/train/")[2].partition(".")
        step = int(group or 0) // 2
        return float(int(member or 0) != 1) if step % 20 < 10 else float(int(member or 0) == 9)

    world.reward_of = of_step
    entry = await carry_out(
        with_settings(
            grpo_draft,
            steps=40,
            validated=False,
            max_staleness=0,
            refill_limit=0,
            collapse={"kind": "notice", "window": 8},
        )
    )
    told = [text for text in notices(entry) if "collapsed" in text]
    assert len(told) == 2
    assert told[0].startswith("The reward collapsed: ")
    assert "lower learning_rate" in told[0]
    assert entry.run.step == 40
