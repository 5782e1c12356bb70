import importlib.util
import json
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    spec = importlib.util.spec_from_file_location("arithmetic_make_tasks", EXAMPLE / "make_tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("tasks")
    module.write(directory)
    return {p.stem: [json.loads(x) for x in p.read_text().splitlines()] for p in directory.iterdir()}


def pair(question: str) -> frozenset[int]:
    return frozenset(map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", question).groups()))


def test_no_held_out_problem_is_trained_on_in_either_order(lines):
    held_out = {pair(t["input"]["question"]) for t in lines["validation"]}
    assert len(held_out) == len(lines["validation"]) == 200
    assert held_out.isdisjoint(pair(t["input"]["question"]) for t in lines["train"])
    assert held_out.isdisjoint(pair(d["messages"][0]["content"]) for d in lines["demonstrations"])


def test_answers_are_right_and_demonstrations_forget_most_carries(lines):
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


def test_the_files_in_the_repository_are_what_the_script_writes(lines):
    for name, expected in lines.items():
        path = EXAMPLE / "tasks" / f"{name}.jsonl"
        assert [json.loads(x) for x in path.read_text().splitlines()] == expected
