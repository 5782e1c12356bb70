"""A run that leaves out rollouts for their length, or cuts them off, says how many and what to do."""

import pytest

from fulmen_algorithm.algorithms.monitors import LengthLimits, LengthMonitor
from fulmen_algorithm.algorithms.policy_gradient import PolicyGradientSettings
from tests.support.algorithm.run_service import notices, with_settings

SIXTEEN = {"prompts_per_step": 4, "group_size": 4, "refill_limit": 4.0, "max_staleness": 0, "steps": 2}


def monitor(said: list[str], *, mask_truncated: bool = True) -> LengthMonitor:
    limits = LengthLimits(mask_truncated=mask_truncated, max_tokens=64, token_budget=100)
    return LengthMonitor(limits, lambda severity, text: said.append(f"{severity}: {text}"))


def test_truncated_rollouts_are_trained_on_unless_the_run_says_otherwise():
    assert PolicyGradientSettings().mask_truncated is False


@pytest.mark.parametrize(
    ("mask_truncated", "remedy"),
    [(True, "left out (mask_truncated). Raise max_tokens, or set"), (False, "scored as they are. Raise max_tokens")],
)
async def test_a_run_with_truncated_answers_says_their_share_and_the_remedy(
    world, grpo_draft, carry_out, mask_truncated, remedy
):
    world.in_order, world.reward_of = True, lambda name: float(name.endswith(".0"))
    world.truncates = lambda name: name.endswith((".1", ".2"))
    settings = {**SIXTEEN, "mask_truncated": mask_truncated, "max_tokens": 5}
    entry = await carry_out(with_settings(grpo_draft, validated=False, **settings))
    told = [text for text in notices(entry) if "cut off at max_tokens = 5" in text]
    assert len(told) == 1
    assert "8 of 16 rollouts (50%) up to step 0" in told[0]
    assert remedy in told[0]
    assert "docs/learning.md" in told[0]
    metrics = entry.events.steps()[-1].values
    assert metrics["rollouts_truncated"] == 8.0
    assert metrics["rollouts_masked"] == (8.0 if mask_truncated else 0.0)


async def test_a_run_with_rollouts_longer_than_the_token_budget_says_so(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, lambda name: float(name.endswith(".0"))
    world.tokens_of = lambda name: 40 if name.endswith(".3") else 2
    entry = await carry_out(with_settings(grpo_draft, validated=False, **SIXTEEN, token_budget=32))
    told = [text for text in notices(entry) if "more than the 32 tokens of token_budget" in text]
    assert len(told) == 1
    assert "4 of 16 rollouts (25%)" in told[0]
    assert entry.events.steps()[-1].values["rollouts_too_long"] == 4.0


def test_a_share_is_told_again_only_when_it_has_doubled():
    said: list[str] = []
    watch = monitor(said)
    for step, truncated in enumerate([2, 3, 3, 4, 16, 16]):
        for index in range(16):
            watch.count(truncated=index < truncated, longest_row=1)
        watch.end_step(step)
    assert [text.split(" (")[0] for text in said] == [f"warning: {n} of 16 rollouts" for n in (2, 4, 16)]


def test_a_few_rollouts_are_judged_together_with_later_ones():
    said: list[str] = []
    watch = monitor(said)
    watch.count(truncated=True, longest_row=1)
    assert watch.end_step(0) == {"rollouts_truncated": 1.0, "rollouts_too_long": 0.0}
    assert not said
    for _ in range(15):
        watch.count(truncated=False, longest_row=1)
    assert watch.end_step(1) == {"rollouts_truncated": 0.0, "rollouts_too_long": 0.0}
    assert not said
