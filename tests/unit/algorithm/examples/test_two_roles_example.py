"""The two_roles example: its tasks are those that its script writes, and each agent is scored by what is its own."""

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "two_roles"


def load(name: str) -> ModuleType:
    """Imports one of its scripts."""
    spec = importlib.util.spec_from_file_location(f"two_roles_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    """Imports the script that writes tasks."""
    return load("make_tasks")


def test_the_files_are_what_the_script_writes_and_no_validation_task_trains(tasks: ModuleType, tmp_path: Path) -> None:
    tasks.write(tmp_path)
    for name in ("train", "validation", "demonstrations"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (EXAMPLE / f"tasks/{name}.jsonl").read_bytes()
    train, held_out = (
        {json.loads(line)["input"]["question"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "validation")
    )
    assert (len(train), len(held_out)) == (800, 100)
    assert not train & held_out


def test_demonstrations_show_both_the_habit_and_the_better_way(tasks: ModuleType) -> None:
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
        # The solver was not asked: nothing is said of it.
        ([], [], "", {"reward": 0.0, "plan": 0.0}),
    ],
)
def test_each_agent_is_scored_by_what_is_its_own(
    parts: list[str], answers: list[str], answer: str, rewards: dict[str, float]
) -> None:
    task = {"input": {"question": "3+8+2+5"}, "answer": "18"}
    graded = load("grader").grade(task, {"parts": parts, "answers": answers, "answer": answer})
    assert graded == rewards
