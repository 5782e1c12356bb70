"""How tokens are weighted follows the agent: whether its rollouts make several model calls."""

import pytest

from fulmen_algorithm.training.rows import Row, calls_per_rollout
from tests.support.algorithm.run_service import notices, with_settings


def row(rollout: str, mask: str) -> Row:
    """Returns a row; `x` is a token that trains."""
    return Row(
        rollout_id=rollout,
        token_ids=tuple(range(len(mask))),
        loss_mask=tuple(each == "x" for each in mask),
        old_logprobs=(0.0,) * len(mask),
        advantages=(0.0,) * len(mask),
        policy_versions=(0,) * len(mask),
    )


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        ([row("a", "..xx")], 1),
        ([row("a", ".xx.x..xxx")], 3),
        ([row("a", ".xx.x"), row("a", ".x")], 3),
        ([row("a", ".x.x.x"), row("b", "..x")], 2),
    ],
)
def test_stretches_of_trained_tokens_are_the_model_calls_of_a_rollout(rows, calls):
    assert calls_per_rollout(rows) == calls


@pytest.mark.parametrize(("turns", "chosen"), [(1, "token_mean"), (3, "per_rollout_mean")])
async def test_the_first_rollouts_decide_how_tokens_are_weighted_and_the_run_says_so(
    turns, chosen, world, grpo_draft, carry_out
):
    world.turns = turns
    entry = await carry_out(with_settings(grpo_draft, aggregation="auto"))
    assert [t for t in notices(entry) if t.startswith("aggregation")] == [
        f"aggregation is {chosen}: a rollout makes {turns:.1f} model calls on average."
    ]
