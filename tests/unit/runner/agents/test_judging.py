"""What a judging model is asked, and what its answer is worth."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.agents.judge import JudgeClient, judge
from fulmen_runner.agents.judging import (
    MAX_OUTCOME_CHARS,
    BadAnswer,
    Scale,
    Verdict,
    fenced,
    mean_rewards,
    response_format,
    system_prompt,
    verdict_of,
)
from fulmen_runner.agents.specification import JudgeTarget
from fulmen_runner.attempts.errors import AgentFailed

SCALE = Scale(dimensions=("style", "truth"), min_score=-1.0, max_score=3.0)
ONE = Scale(dimensions=("reward",), min_score=0.0, max_score=10.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "ok", "scores": {"style": 1, "truth": 3}}',
        '```json\n{"reason": "ok", "scores": {"style": 1.0, "truth": 3}}\n```',
        'First {"scores": {"style": 9, "truth": 9}}, or rather {"reason": "ok", "scores": {"style": 1, "truth": 3}}.',
        '{"style": 1, "truth": 3, "reason": "ok"}',
        '{ {"a": {1} {"reason": "ok", "scores": {"style": 1, "truth": 3, "more": 7}}',
    ],
)
def test_the_last_object_with_scores_is_the_verdict(text: str) -> None:
    verdict = verdict_of(text, SCALE)
    assert verdict == Verdict(scores={"style": 1.0, "truth": 3.0}, reason="ok")
    assert mean_rewards([verdict], SCALE) == {"style": 0.5, "truth": 1.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "no JSON object"),
        ('{"reason": "fine"}', "no JSON object"),
        ('{"reward": 11}', "is 11, not from 0 to 10"),
        ('{"reward": -0.1}', "is -0.1, not"),
        ('{"reward": NaN}', "is nan"),
        ('{"reward": 1e999}', "is inf"),
        ('{"reward": ' + "9" * 400 + "}", "is 9999"),
        ('{"reward": "7"}', "not a number"),
        ('{"reward": true}', "not a number"),
        ('{"scores": {"style": 7}}', "missing"),
        ("{" * 20_000, "no JSON object"),
        ('{"a":' * 20_000, "no JSON object"),
    ],
)
def test_anything_else_is_a_bad_answer(text: str, says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        verdict_of(text, ONE)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9))
def test_rewards_are_means_from_0_to_1(scores: list[float]) -> None:
    verdicts = [verdict_of(json.dumps({"scores": {"reward": score}}), ONE) for score in scores]
    [mean] = mean_rewards(verdicts, ONE).values()
    assert 0 <= mean <= 1
    assert math.isclose(mean, sum(scores) / len(scores) / 10, abs_tol=1e-12)


@given(st.text(max_size=200))
def test_data_cannot_end_before_its_marker(text: str) -> None:
    marked = fenced(text, "0123456789abcdef")
    assert marked.count("[end 0123456789abcdef]") == 1 + text.count("[end 0123456789abcdef]")
    assert marked.endswith("\n[end 0123456789abcdef]")
    assert "0123456789abcdef" in system_prompt(SCALE, "0123456789abcdef")


def test_long_data_is_cut_at_its_front() -> None:
    assert fenced("a" * MAX_OUTCOME_CHARS + "end", "m").count("a") <= MAX_OUTCOME_CHARS
    assert "end\n" in fenced("a" * MAX_OUTCOME_CHARS + "end", "m")


def test_the_schema_names_every_dimension_and_its_bounds() -> None:
    schema = response_format(SCALE)["json_schema"]["schema"]
    scores = schema["properties"]["scores"]
    assert list(schema["properties"]) == ["reason", "scores"]
    assert scores["required"] == ["style", "truth"]
    assert scores["properties"]["truth"] == {"type": "number", "minimum": -1.0, "maximum": 3.0}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": ""}, "no model"),
        ({"dimensions": ()}, "1 to 16"),
        ({"dimensions": ("a", "a")}, "different"),
        ({"dimensions": ("A",)}, "must be 1 to 64"),
        ({"min_score": 1.0, "max_score": 1.0}, "must be greater"),
        ({"max_score": math.inf}, "must be greater"),
        ({"sample_count": 10}, "sample_count"),
    ],
)
def test_a_judge_out_of_its_range_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(AgentFailed, match=says):
        judge(JudgeTarget(**{"model": "m", **fields}), JudgeClient())
