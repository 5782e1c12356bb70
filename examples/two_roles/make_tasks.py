"""Writes the task files of the two_roles example: sums of four digits.

The demonstrations imitate two sloppy teachers. The planner's teacher usually writes the first part twice and omits the
second (`3+8+2+5?` becomes `3+8 3+8`). The solver's usually forgets the carry (`3+8=` becomes `1`). Each agent improves
on that through its own reward.

Invariant: no sum occurs twice, so no validation task is among the training tasks or the planner's demonstrations.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRAIN_TASKS, VALIDATION_TASKS = 800, 100
LOST_PARTS = FORGOTTEN_CARRIES = 0.7
SEED = 1
Sum = tuple[int, int, int, int]


def question(numbers: Iterable[int]) -> str:
    """Renders a sum."""
    return "+".join(map(str, numbers))


def task(numbers: Sum, name: str) -> dict[str, Any]:
    """Renders a line of a task file."""
    return {"id": name, "input": {"question": question(numbers)}, "answer": str(sum(numbers))}


def demonstrations(numbers: Sum, teacher: random.Random) -> list[dict[str, Any]]:
    """Renders the planner's teacher's demonstration of a sum, and the solver's teacher's of one of its parts."""
    first, second = question(numbers[:2]), question(numbers[2:])
    plan = f"{first} {first if teacher.random() < LOST_PARTS else second}"
    added = sum(numbers[:2])
    answer = added - 10 if added >= 10 and teacher.random() < FORGOTTEN_CARRIES else added
    return [_conversation(f"{question(numbers)}?", plan), _conversation(f"{first}=", str(answer))]


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, teacher = random.Random(SEED), random.Random(SEED)
    drawn: dict[Sum, None] = {}
    while len(drawn) < TRAIN_TASKS + VALIDATION_TASKS:
        first, second = chance.sample(range(100), 2)
        drawn[(*divmod(first, 10), *divmod(second, 10))] = None
    train, held_out = list(drawn)[:TRAIN_TASKS], list(drawn)[TRAIN_TASKS:]
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_lines(output_dir / "train.jsonl", (task(n, f"train-{i}") for i, n in enumerate(train)))
    _write_lines(output_dir / "validation.jsonl", (task(n, f"validation-{i}") for i, n in enumerate(held_out)))
    _write_lines(
        output_dir / "demonstrations.jsonl", (line for numbers in train for line in demonstrations(numbers, teacher))
    )


def _conversation(asked: str, answered: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
