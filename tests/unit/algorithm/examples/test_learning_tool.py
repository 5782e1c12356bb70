"""The tool of docs/learning.md trains an example in one process and reports its curve."""

import asyncio

import pytest

from benchmarks.train import gain, learning
from benchmarks.train.world import Agent, Queue
from fulmen_algorithm.rollouts.groups import GroupSpec, Mode


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


@pytest.mark.long(short=True)
async def test_the_policies_before_and_after_answer_the_same_test_tasks_and_the_gain_has_an_interval(tmp_path):
    few = ("first:steps=2", "first:warmup_steps=0", "steps=1", "warmup_steps=0", "prompts_per_step=2")

    found = await gain.measured("text_to_sql", 3, assignments=few, cache=tmp_path)

    assert found["test_tasks"] >= 200
    assert found["gain"] == pytest.approx(found["after"] - found["before"], abs=1e-3)
    assert found["gain_low"] <= found["gain"] <= found["gain_high"]
    assert found["gained_tasks"] - found["lost_tasks"] == pytest.approx(found["gain"] * found["test_tasks"], abs=0.1)
    assert found["model_calls"] >= 2 * found["test_tasks"]
    assert found["sampled_tokens"] > found["model_calls"]


def test_an_example_without_test_tasks_is_refused_before_any_is_trained(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gain", "text_to_sql", "orders"])
    with pytest.raises(SystemExit):
        gain.main()
    assert "no example with test tasks: orders" in capsys.readouterr().err


def test_every_example_whose_gain_is_measured_has_test_tasks_and_three_seeds():
    for name, seeds in gain.SEEDS.items():
        assert learning.example(name).data.test is not None
        assert len(set(seeds)) == 3


async def test_groups_are_returned_in_the_order_in_which_they_were_asked_for():
    second_is_done = asyncio.Event()

    async def solve(task: int) -> int:
        if task == 2:
            second_is_done.set()
        await second_is_done.wait()
        return task

    queue = Queue(Agent(solve=solve, grade=lambda task, outcome: float(outcome)), slots=2)
    groups = [GroupSpec(group_id=f"test/{n}", task=str(n).encode(), size=1, mode=Mode.TEST) for n in (1, 2, 3)]

    async with asyncio.timeout(60), queue:
        finished = await queue.finished(groups)

    assert [group.rollouts[0].reward for group in finished] == [1.0, 2.0, 3.0]
