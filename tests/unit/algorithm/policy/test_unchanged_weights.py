"""A version is published for weights that changed, and for no others."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.run_service import descriptions, kills, notices, with_settings

# Even a weight of 0 stays as it is: float32 has no such number.
TINY_STEPS = {"learning_rate": 1e-60, "warmup_steps": 0}
DELTA = {"weights": {"kind": "delta", "dtype": "bfloat16", "full_every": 9, "dense_above": 1.0}}


def small(draft: RunDraft, **more: object) -> RunDraft:
    """Returns a run of one group of two for each step, without validation."""
    settings = {"prompts_per_step": 1, "group_size": 2, "refill_limit": 0.0, "max_staleness": 0, **more}
    return with_settings(draft, validated=False, **settings)


def differs_in(*indices: int) -> Callable[[str], float]:
    """Returns rewards that are equal in all groups but some."""
    names = tuple(f"/train/{index}.0" for index in indices)
    return lambda name: float(name.endswith(names))


def checksums(world) -> list[str]:
    return [str(each["sha256"]) for each in descriptions(world)]


async def test_steps_without_a_signal_publish_nothing(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, differs_in(3)
    entry = await carry_out(small(grpo_draft, steps=8))
    assert [each["step"] for each in descriptions(world)] == [0, 4]
    assert world.served_versions == [1, 2]
    assert entry.run.policy_version.endswith("/versions/2")
    assert read_folder(Path(entry.run.model_path)).sha256() == checksums(world)[-1]
    assert any("7 of 8 steps changed no weights" in text for text in notices(entry))


async def test_what_a_version_that_remains_has_sampled_does_not_grow_old(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, differs_in(5)
    entry = await carry_out(small(grpo_draft, steps=8, max_staleness=1))
    assert [each["step"] for each in descriptions(world)] == [0, 6]
    assert sum(step.values.get("groups_too_stale", 0) for step in entry.events.steps()) == 0


@pytest.mark.parametrize("weights", [{}, DELTA], ids=["full", "delta"])
async def test_optimiser_steps_that_change_no_number_publish_nothing(world, grpo_draft, carry_out, weights):
    world.reward_of = lambda name: float(name.endswith(".0"))
    entry = await carry_out(small(grpo_draft, **TINY_STEPS, **weights))
    assert len(set(checksums(world))) == 1
    assert len(checksums(world)) == 1
    assert read_folder(Path(entry.run.model_path)).sha256() == checksums(world)[0]


async def test_the_last_version_is_complete_whether_the_last_steps_changed_it_or_not(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, differs_in(0, 1)
    entry = await carry_out(small(grpo_draft, steps=4, learning_rate=1e-4, warmup_steps=0, **DELTA))
    assert [(each["step"], each["kind"]) for each in descriptions(world)] == [
        (0, "full"), (1, "delta"), (2, "delta"), (4, "full"),
    ]  # fmt: skip
    assert read_folder(Path(entry.run.model_path)).sha256() == checksums(world)[-1]


@pytest.mark.parametrize("trial", range(3))
async def test_a_run_that_is_killed_between_steps_without_a_signal_goes_on(trial, world, grpo_draft, carry_out):
    chance = random.Random(trial)
    world.in_order, world.reward_of = True, differs_in(1, 5)
    draft = small(grpo_draft, steps=8, checkpoint_every=1, max_staleness=1)
    entry = await carry_out(draft, killed=kills(chance, calls=25))
    assert sorted({int(str(each["step"])) for each in descriptions(world)}) == [0, 2, 6]
    assert entry.run.policy_version == world.served.name
