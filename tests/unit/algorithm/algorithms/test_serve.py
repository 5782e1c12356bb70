"""A version is served for its time, across kills of the service, and until it is stopped."""

import json
import random
from dataclasses import replace

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import NO_POLICY, PolicyOrigin, PolicySpec, RunState
from tests.support.algorithm.run_service import created, kills, notices

MOMENT = 1e-6


@pytest.fixture
def draft(grpo_draft: RunDraft, world, tiny_model) -> RunDraft:
    world.add_resource("resources/policy.tiny", json.dumps({"path": str(tiny_model)}).encode())
    return replace(
        grpo_draft,
        algorithm="serve",
        settings_json=json.dumps({"hours": MOMENT}),
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.NEWEST),
        inputs={},
    )


@pytest.mark.parametrize("trial", range(3))
async def test_the_newest_version_is_served_without_an_agent_wherever_the_service_is_killed(
    trial, world, draft, carry_out
):
    entry = await carry_out(draft, killed=kills(random.Random(trial), calls=2) if trial else ())
    assert set(world.served_versions) == {1}
    assert entry.run.results == {"served_version": 1.0}
    assert any(
        text.startswith("resources/policy.tiny/versions/1 is served as `tiny` until ") for text in notices(entry)
    )


async def test_a_run_without_a_policy_says_what_to_name(draft, carry_out):
    entry = await carry_out(replace(draft, policy=NO_POLICY), state=RunState.FAILED)
    assert "names no policy to serve" in entry.run.failure_message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"settings_json": '{"hours": 0}'}, "settings.hours"),
        ({"settings_json": '{"hours": 1000}'}, "settings.hours"),
        ({"policy": PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source="/tmp")}, "policy.path"),
    ],
)
async def test_contradicting_settings_are_refused(world, draft, change, field):
    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, **change), world)
    assert [each.field for each in caught.value.violations] == [field]
