"""Tokens of a policy version that the run does not know, such as those of another engine, are never trained on."""

import pytest

from tests.support.algorithm.run_service import run_folder, with_settings
from tests.support.algorithm.training import read_consumed

UNKNOWN, NONE = 10**6, 0


@pytest.mark.parametrize("max_staleness", [0, 4])
async def test_a_token_of_unknown_version_never_counts_as_fresh(max_staleness, world, grpo_draft, carry_out, tmp_path):
    world.foreign = {".0": UNKNOWN, ".1": NONE}
    world.reward_of = lambda name: float(name.endswith((".0", ".2")))
    draft = with_settings(
        grpo_draft, validated=False, prompts_per_step=1, steps=3, group_size=4, max_staleness=max_staleness
    )
    entry = await carry_out(draft)
    trained = [name for line in read_consumed(run_folder(tmp_path)) for name in line["trained"]]
    assert {name.rpartition(".")[2] for name in trained} == {"2", "3"}
    assert [step.values["rows_stale"] for step in entry.events.steps()] == [2.0] * 3
