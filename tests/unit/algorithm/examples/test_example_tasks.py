"""The examples' task files are what their scripts write, and no validation task is trained on."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.algorithm.models import EXAMPLES, load_script

NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/make_tasks.py"))
OF_SEVERAL_INPUTS = {"nim", "retrieval"}
"""Examples in which a board has several opponents, or a question another answer in another library. Tests of their own compare
boards and libraries."""


def lines_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def problem(text: str, *_: object) -> object:
    """Returns a problem without the order of the numbers of a sum of two."""
    sum_of_two = re.fullmatch(r"(\d\d)\+(\d\d)=", text)
    return frozenset(sum_of_two.groups()) if sum_of_two else text


@pytest.mark.parametrize("name", NAMES)
def test_task_files_are_what_the_script_writes_and_no_validation_task_is_trained_on(name, tmp_path):
    load_script(EXAMPLES / name / "make_tasks.py").write(tmp_path)
    lines = lines_of(tmp_path)
    assert lines_of(EXAMPLES / name / "tasks") == lines
    named = tuple if name in OF_SEVERAL_INPUTS else lambda values: problem(*values)
    train, held_out = ({named(each["input"].values()) for each in lines[use]} for use in ("train", "validation"))
    assert len(held_out) == len(lines["validation"]) >= 100
    assert held_out.isdisjoint(train)
    assert held_out.isdisjoint(problem(each["messages"][0]["content"]) for each in lines["demonstrations"])


def test_arithmetic_answers_are_right_and_demonstrations_forget_most_carries():
    lines = lines_of(EXAMPLES / "arithmetic/tasks")
    for task in (*lines["train"], *lines["validation"]):
        left, right = task["input"]["question"].rstrip("=").split("+")
        assert task["answer"] == str(int(left) + int(right))
    carried = forgotten = 0
    for demonstration in lines["demonstrations"]:
        question, answer = (m["content"] for m in demonstration["messages"])
        left, right = map(int, question.rstrip("=").split("+"))
        missing = left + right - int(answer)
        if left % 10 + right % 10 < 10:
            assert missing == 0
        else:
            carried += 1
            forgotten += missing == 10
            assert missing in (0, 10)
    assert 0.65 < forgotten / carried < 0.75


def test_some_demonstrations_of_the_calculator_stop_before_the_last_step():
    tasks = load_script(EXAMPLES / "calculator/make_tasks.py")
    ends = {tasks.demonstration("10+10+10+10+10+10+10", random.Random(n))["messages"][-1]["content"] for n in range(9)}
    assert ends == {"50", "70"}


def test_demonstrations_of_two_roles_show_both_the_habit_and_the_better_way():
    tasks = load_script(EXAMPLES / "two_roles/make_tasks.py")
    shown = [tasks.demonstrations((3, 8, 2, 5), random.Random(seed)) for seed in range(40)]
    plans, answers = ({each["messages"][1]["content"] for each in column} for column in zip(*shown, strict=True))
    assert plans == {"3+8 2+5", "3+8 3+8"}
    assert answers == {"11", "1"}


@pytest.mark.parametrize(
    ("parts", "answers", "answer", "rewards"),
    [
        (["3+8", "2+5"], ["11", "7"], "18", {"reward": 1.0, "plan": 1.0, "parts": 1.0}),
        (["5+8", "2+3"], ["13", "5"], "18", {"reward": 1.0, "plan": 1.0, "parts": 1.0}),
        (["3+8", "3+8"], ["11", "1"], "12", {"reward": 0.0, "plan": 0.0, "parts": 0.5}),
        (["3+8"], ["11"], "11", {"reward": 0.0, "plan": 0.0, "parts": 1.0}),
        # The solver was not called and has no reward.
        ([], [], "", {"reward": 0.0, "plan": 0.0}),
    ],
)
def test_each_of_two_roles_is_scored_by_its_own_work(parts, answers, answer, rewards):
    task = {"input": {"question": "3+8+2+5"}, "answer": "18"}
    grader = load_script(EXAMPLES / "two_roles/grader.py")
    assert grader.grade(task, {"parts": parts, "answers": answers, "answer": answer}) == rewards
