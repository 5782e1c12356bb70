"""The tool of docs/learning.md trains an example in one process and reports its curve."""

import pytest

from benchmarks.train import learning


@pytest.mark.long(short=True)
async def test_an_example_is_trained_and_its_curve_reported(tmp_path):
    few = ["first:steps=2", "first:warmup_steps=0", "steps=1", "warmup_steps=0", "prompts_per_step=2"]
    config = learning.example("two_roles", assignments=few, seed=3)
    told: list[dict[str, object]] = []

    result = await learning.train(config, cache=tmp_path, report=told.append)

    assert [step for step, _, _ in result.curve] == [0, 1]
    assert (result.before, result.after) == (result.curve[0][2], result.curve[-1][2])
    assert result.seconds.keys() == {"sft", "grpo"}
    assert told
    assert list(tmp_path.iterdir()), "the weights after imitation are kept for the next experiment"
