"""The weight of the entropy follows its target from step to step, and over crashes."""

import random

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.options.entropy_control import adapted
from fulmen_algorithm.losses.entropy_settings import EntropyTarget
from fulmen_algorithm.runs.creation.rules import parse_settings
from tests.support.algorithm.run_service import ALGORITHMS, kills, with_settings

TARGET = {"kind": "target", "target": 5.0, "step": 0.01, "max": 0.025}


def by_the_paper(entropies: list[float], settings: EntropyTarget) -> list[float]:
    """alpha_k of each step: c_k where the entropy before was at most the target; c grows or falls by its step."""
    coefficient, used, last = 0.0, [], float("inf")
    for entropy in entropies:
        used.append(coefficient if last <= settings.target else 0.0)
        rises = entropy <= settings.target
        coefficient = max(0.0, min(settings.max, coefficient + (settings.step if rises else -settings.step)))
        last = entropy
    return used


def test_the_coefficient_moves_towards_the_target_within_its_bounds():
    settings = EntropyTarget(target=0.5, step=0.1, max=0.25)
    found, coefficient = [], 0.0
    for entropy in (0.9, 0.4, 0.5, 0.1, 0.6, 0.7):
        coefficient = adapted(coefficient, entropy, settings)
        found.append(coefficient)
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.15, 0.05])


@pytest.mark.parametrize("trial", range(2))
async def test_a_run_adapts_the_coefficient_whenever_the_process_is_killed(trial, world, grpo_draft, carry_out):
    world.chance = random.Random(trial)
    draft = with_settings(grpo_draft, entropy=TARGET, steps=5, checkpoint_every=2, max_staleness=2)
    entry = await carry_out(draft, killed=kills(world.chance, calls=28) if trial else ())
    # A step that is taken again after a crash is reported again; its numbers are those that count.
    steps = {each.step: each.values for each in entry.events.steps() if each.step}
    entropies = [steps[number]["entropy"] for number in range(1, 6)]
    found = [steps[number]["entropy_coefficient"] for number in range(1, 6)]
    assert found == pytest.approx(by_the_paper(entropies, EntropyTarget(**TARGET)))
    assert found == pytest.approx([0.0, 0.01, 0.02, 0.025, 0.025])


def test_problems_of_the_settings_are_reported_together():
    text = '{"entropy": {"kind": "target", "target": -1}, "loss": {"kind": "kl_cov", "share": 2}, "steps": 0}'
    with pytest.raises(SettingsInvalid) as caught:
        parse_settings(ALGORITHMS["grpo"], text)
    assert {each.field for each in caught.value.violations} >= {"settings.steps"}
    assert len(caught.value.violations) == 3
