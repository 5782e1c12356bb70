"""A run whose rewards are all equal from the beginning warns; one that has learned all it can does not."""

from collections.abc import Callable
from functools import partial

import pytest

from fulmen_algorithm.algorithms.monitors import STEPS_TO_STOP
from fulmen_algorithm.algorithms.monitors import STEPS_WITHOUT_SIGNAL as STEPS
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes
from tests.support.algorithm.run_service import carried_out, notices, run_folder, with_settings

WARNING = "all rewards are equal"


def small(draft: RunDraft, **more: object) -> RunDraft:
    """Returns a run of one group of two for each step, without validation."""
    settings = {"prompts_per_step": 1, "group_size": 2, "refill_limit": 0.0, "max_staleness": 0, **more}
    return with_settings(draft, validated=False, **settings)


def differs_in(index: int) -> Callable[[str], float]:
    """Returns rewards that are equal in all groups but one."""
    return lambda name: float(name.endswith(".0")) if f"/train/{index}." in name else 1.0


@pytest.mark.parametrize(("first_that_differs", "count"), [(0, 0), (STEPS - 1, 0), (STEPS, 1), (100, 1)])
async def test_equal_rewards_from_the_beginning_are_reported_once(
    first_that_differs, count, world, grpo_draft, carry_out
):
    world.in_order, world.reward_of = True, differs_in(first_that_differs)
    entry = await carry_out(small(grpo_draft, steps=2 * STEPS))
    assert sum(WARNING in text for text in notices(entry)) == count
    spent = entry.events.steps()[-1].values
    assert {"spent_submit_seconds", "spent_checkpoint_seconds"} <= spent.keys()


async def test_a_run_that_trained_before_a_restart_does_not_warn(world, grpo_draft, carry_out, tmp_path):
    world.in_order, world.reward_of = True, differs_in(0)
    steps = []

    def killed():
        yield Crashes(at_call=16)
        newest = RunFiles(run_folder(tmp_path)).checkpoint_store().listed()[-1]
        steps.append(newest.progress["step"])

    entry = await carry_out(small(grpo_draft, steps=4 * STEPS, checkpoint_every=1), killed=killed())
    assert 1 <= steps[0] <= 3 * STEPS, "the run trained before the kill and long enough after it"
    assert not any(WARNING in text for text in notices(entry))


@pytest.mark.parametrize(
    ("default", "setting", "state"),
    [
        ("notice", None, RunState.SUCCEEDED),
        ("stop", None, RunState.FAILED),
        ("notice", "stop", RunState.FAILED),
        ("stop", "notice", RunState.SUCCEEDED),
    ],
)
async def test_a_run_without_a_signal_stops_where_it_is_to(world, grpo_draft, open_service, default, setting, state):
    world.in_order, world.reward_of = True, lambda name: 1.0
    steps = STEPS_TO_STOP + 2
    opens = partial(open_service, on_no_signal=default)
    draft = small(grpo_draft, steps=steps, on_no_signal=setting)
    entry = await carried_out(draft, world=world, open_service=opens, state=state)
    if state is RunState.FAILED:
        assert f"Nothing was learned up to step {STEPS_TO_STOP}" in entry.run.failure_message
        assert 'on_no_signal = "notice"' in entry.run.failure_message
    else:
        assert f"none of its {steps} steps changed the weights" in notices(entry)[-1]
        assert "docs/learning.md" in notices(entry)[-1]


async def test_a_run_with_a_signal_in_the_end_does_not_stop(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, differs_in(STEPS_TO_STOP - 1)
    entry = await carry_out(small(grpo_draft, steps=STEPS_TO_STOP + 5, on_no_signal="stop"))
    told = f"{STEPS_TO_STOP + 4} of {STEPS_TO_STOP + 5} steps changed no weights"
    assert any(told in text for text in notices(entry))
