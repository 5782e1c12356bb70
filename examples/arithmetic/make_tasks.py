"""Writes the task files of the arithmetic example: sums of two numbers of two digits, split by unordered pair.

The demonstrations imitate a sloppy teacher who forgets most carries (27+15=32). A model that imitates them adds
correctly only without a carry; it improves on that through rewards. Every training problem has a demonstration, right
or wrong.

Invariant: no validation problem occurs, in either order of its operands, among the training tasks or demonstrations.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Pair = tuple[int, int]

LOWEST, HIGHEST = 10, 99
VALIDATION_TASKS = 200
FORGOTTEN_CARRIES = 0.7
SPLIT_SEED = 1


def question(pair: Pair) -> str:
    """Renders the question of a problem."""
    return f"{pair[0]}+{pair[1]}="


def carries(pair: Pair) -> bool:
    """Returns whether the units carry into the tens."""
    return pair[0] % 10 + pair[1] % 10 >= 10


def split(*, validation: int = VALIDATION_TASKS, seed: int = SPLIT_SEED) -> tuple[list[Pair], list[Pair]]:
    """Draws training and validation problems, disjoint by unordered pair.

    Returns:
        All ordered training pairs, and `validation` pairs in a random order of operands; both shuffled.
    """
    shuffler = random.Random(seed)
    unordered = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(a, HIGHEST + 1)]
    shuffler.shuffle(unordered)
    train = [pair for a, b in unordered[validation:] for pair in sorted({(a, b), (b, a)})]
    shuffler.shuffle(train)
    held_out = [pair if shuffler.random() < 0.5 else (pair[1], pair[0]) for pair in unordered[:validation]]
    return train, held_out


def demonstrated_answer(pair: Pair, teacher: random.Random, *, forgotten_carries: float = FORGOTTEN_CARRIES) -> int:
    """Returns the sloppy teacher's answer."""
    forgets = carries(pair) and teacher.random() < forgotten_carries
    return sum(pair) - 10 if forgets else sum(pair)


def task(pair: Pair, name: str) -> dict[str, Any]:
    """Renders a line of a task file."""
    return {"id": name, "input": {"question": question(pair)}, "answer": str(sum(pair))}


def demonstration(pair: Pair, answer: int) -> dict[str, Any]:
    """Renders a line of the demonstrations file."""
    return {
        "messages": [{"role": "user", "content": question(pair)}, {"role": "assistant", "content": str(answer)}],
    }


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl and demonstrations.jsonl; the output is deterministic."""
    train, held_out = split()
    teacher = random.Random(SPLIT_SEED)
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_lines(output_dir / "train.jsonl", (task(p, f"train-{i}") for i, p in enumerate(train)))
    _write_lines(output_dir / "validation.jsonl", (task(p, f"validation-{i}") for i, p in enumerate(held_out)))
    _write_lines(
        output_dir / "demonstrations.jsonl", (demonstration(p, demonstrated_answer(p, teacher)) for p in train)
    )


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
