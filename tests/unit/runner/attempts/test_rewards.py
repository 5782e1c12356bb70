"""What counts as a reward."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.program import encode_output
from fulmen_runner.attempts.rewards import joined, reward_of_number, rewards_of_grade, rewards_of_last_line


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_are_the_final_reward(value: object) -> None:
    assert reward_of_number(value) == (Reward(value=1.0),)


@pytest.mark.parametrize("value", ["1", None, [1], {"a": 1}, b"1", object()])
def test_anything_else_that_an_agent_returns_is_an_outcome(value: object) -> None:
    assert reward_of_number(value) == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_numbers_that_are_not_finite_are_refused(value: object) -> None:
    with pytest.raises(AgentFailed, match="finite"):
        reward_of_number(value)


def test_a_grade_may_be_a_mapping() -> None:
    assert rewards_of_grade({"exact": True, "style": 0.5}) == (
        Reward(dimension="exact", value=1.0),
        Reward(dimension="style", value=0.5),
    )
    assert rewards_of_grade(None) == rewards_of_grade({}) == ()


@pytest.mark.parametrize("value", ["good", [1], {"Exact": 1}, {"exact": "1"}, {"exact": math.nan}])
def test_other_grades_are_refused(value: object) -> None:
    with pytest.raises(AgentFailed):
        rewards_of_grade(value)


@pytest.mark.parametrize(
    ("output", "rewards"),
    [
        ("0.5", (Reward(value=0.5),)),
        ("working...\n1\n\n", (Reward(value=1.0),)),
        ('done\n{"exact": 1, "style": 0.5}', (Reward(dimension="exact", value=1.0), Reward(dimension="style", value=0.5))),
        ("done", ()),
        ("", ()),
        ("true", ()),
        ('"1"', ()),
        ("1\ndone", ()),
    ],
)  # fmt: skip
def test_the_last_line_of_a_command(output: str, rewards: tuple[Reward, ...]) -> None:
    assert rewards_of_last_line(output) == rewards


@pytest.mark.parametrize("output", ["NaN", "Infinity", '{"exact": "yes"}'])
def test_a_last_line_that_is_nearly_a_reward_is_refused(output: str) -> None:
    with pytest.raises(AgentFailed):
        rewards_of_last_line(output)


def test_later_rewards_replace_earlier_ones_of_the_same_kind() -> None:
    of_span = Reward(value=4.0, span_id=b"12345678")
    assert joined((Reward(value=1.0), Reward(value=2.0, step=1), of_span), (Reward(value=3.0),)) == (
        Reward(value=3.0),
        Reward(value=2.0, step=1),
        of_span,
    )


@pytest.mark.parametrize(
    ("value", "content", "content_type"),
    [
        (None, b"", ""),
        ("plain", b"plain", "text/plain; charset=utf-8"),
        ({"a": [1]}, b'{"a": [1]}', "application/json"),
        ("x" * 70_000, b"x" * 65_536, "text/plain; charset=utf-8"),
        (math.nan, b"builtins.float object, not representable in JSON", "text/plain; charset=utf-8"),
    ],
)
def test_output_is_encoded_within_its_limit(value: object, content: bytes, content_type: str) -> None:
    output = encode_output(value)
    assert (output.content, output.content_type) == (content, content_type)
