"""The example of four roles: each agent is scored by what it did itself."""

from __future__ import annotations

import json

from tests.support.algorithm.models import EXAMPLES, load_script

FOLDER = EXAMPLES / "four_roles"
TASK = {"input": {"question": "2+9+1+4"}, "answer": "16"}
PARTS = ["2+9", "1+4"]


def graded(computed: list, answer: str, parts: list[str] = PARTS) -> dict[str, float]:
    rewards: dict[str, float] = load_script(FOLDER / "grader.py").grade(
        TASK, {"parts": parts, "computed": computed, "answer": answer}
    )
    return rewards


def test_all_are_right():
    rewards = graded([[["1", "n"], ["11", "y"]], [["5", "y"]]], "16")
    assert rewards == {"reward": 1.0, "plan": 1.0, "results": 2 / 3, "verdicts": 1.0, "total": 1.0}


def test_a_generator_that_adds_up_wrong_results_well_has_its_reward():
    rewards = graded([[["1", "y"]], [["5", "y"]]], "6")
    assert rewards == {"reward": 0.0, "plan": 1.0, "results": 0.5, "verdicts": 0.5, "total": 1.0}


def test_a_verifier_that_doubts_what_is_right_is_wrong():
    assert graded([[["11", "n"], ["11", "n"]], [["5", "y"]]], "16")["verdicts"] == 1 / 3


def test_who_was_not_called_has_no_reward():
    assert graded([], "", parts=[]) == {"reward": 0.0, "plan": 0.0}
    assert "total" not in graded([[["?", "y"]], [["5", "y"]]], "")


def test_no_sum_of_a_test_or_validation_task_is_one_of_a_training_task():
    questions = [
        {json.loads(line)["input"]["question"] for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()}
        for use in ("train", "validation", "test")
    ]
    assert sum(map(len, questions)) == len(set.union(*questions)) == 1900
