"""Past versions of the policy as opponents: which, for how long, and that they do not train."""

import json
import random

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.runs.creation.rules import parse_settings
from tests.support.algorithm.run_service import ALGORITHMS, check, created, kills, with_settings

PAST = {"kind": "past", "every": 2, "keep": 3}
GAME = {"first": ("tiny", "tiny"), "second": ("tiny-past", "tiny-past")}


def steps_of(entry) -> list[dict[str, float]]:
    found = {each.step: each.values for each in entry.events.steps() if each.step}
    return [found[number] for number in sorted(found)]


async def test_the_latest_version_is_the_opponent_until_it_is_a_few_steps_old(world, grpo_draft, carry_out):
    draft = with_settings(grpo_draft, opponents={**PAST, "pick": "latest"}, steps=6)
    steps = steps_of(await carry_out(draft))
    # Version n + 1 has the weights after step n.
    assert world.past_versions == [1, 3, 5, 7]
    assert [step["opponent_version"] for step in steps] == [1, 1, 3, 3, 5, 5]
    assert [step["opponent_age_steps"] for step in steps] == [0, 1, 0, 1, 0, 1]


async def test_weights_of_the_pool_are_kept_for_as_long_as_they_are_in_it(world, grpo_draft, carry_out):
    # The service keeps the weights of two versions; the world opens the folder of each that it serves.
    draft = with_settings(grpo_draft, opponents={"kind": "past", "every": 1, "keep": 4}, steps=12, seed=5)
    steps = steps_of(await carry_out(draft))
    ages = [step["opponent_age_steps"] for step in steps]
    assert max(ages) == 3
    assert all(age <= 3 for age in ages)
    assert len(set(world.past_versions)) > 4


@pytest.mark.parametrize("trial", range(3))
async def test_a_run_that_is_killed_goes_on_with_its_opponent(trial, world, grpo_draft, carry_out, tmp_path):
    world.chance = random.Random(trial)
    draft = with_settings(grpo_draft, opponents={**PAST, "pick": "latest"})
    steps = steps_of(await carry_out(draft, killed=kills(world.chance, calls=40)))
    check(tmp_path, world)
    # After a crash weights may be published again under another number; their steps are the same.
    assert [step["opponent_age_steps"] for step in steps] == [0, 1, 0, 1]


async def test_what_the_opponent_samples_does_not_train_and_roles_have_their_own_baseline(world, grpo_draft, carry_out):
    world.roles = GAME
    draft = with_settings(grpo_draft, opponents=PAST, roles={"baseline": "role"}, steps=2)
    for step in steps_of(await carry_out(draft)):
        assert step["rows"] == step["role_first_rows"] > 0
        assert "role_second_rows" not in step


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"engine": {"kind": "vllm"}}, "engine.kind embedded"),
        ({"weights": {"kind": "delta"}}, "weights.kind full"),
        ({"lora": {}}, "no lora"),
    ],
)
def test_opponents_that_cannot_be_served_are_refused(settings, missing):
    with pytest.raises(SettingsInvalid, match="not valid") as caught:
        parse_settings(ALGORITHMS["grpo"], json.dumps({"opponents": PAST, **settings}))
    assert any(missing in each.description for each in caught.value.violations)


async def test_an_opponent_needs_an_engine_more(world, grpo_draft):
    draft = with_settings(grpo_draft, opponents=PAST)
    with pytest.raises(SettingsInvalid) as caught:
        await created(draft, world, max_engines=1)
    [violation] = caught.value.violations
    assert "needs 2 engines; the service has at most 1" in violation.description
