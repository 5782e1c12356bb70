"""Writes the task files of the four_roles example: sums of four digits.

The demonstrations imitate four sloppy teachers. Seven times out of ten, the planner's teacher writes the first part
instead of the last, the executor's forgets the carry, the verifier's answers yes to everything, and the generator's
leaves out the last result. Each agent improves on that through its own reward.

Invariant: no sum occurs twice, so no validation or test task is among the training tasks or the planner's demonstrations.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COUNTS = {"train": 1500, "validation": 100, "test": 300}
DIGITS = 4
SLOPPY = 0.7
SEED = 1


def joined(numbers: Iterable[int]) -> str:
    """Renders a sum."""
    return "+".join(map(str, numbers))


def demonstrations(numbers: tuple[int, ...], teacher: random.Random) -> list[dict[str, Any]]:
    """Renders the four teachers' answers to a sum."""
    parts = [joined(numbers[first : first + 2]) for first in range(0, DIGITS, 2)]
    plan = [*parts[:-1], parts[0] if teacher.random() < SLOPPY else parts[-1]]
    results = [sum(numbers[first : first + 2]) for first in range(0, DIGITS, 2)]
    said = []
    for part, result in zip(parts, results, strict=True):
        told = result - 10 if result >= 10 and teacher.random() < SLOPPY else result
        shown = told if teacher.random() < 0.5 else result
        verdict = "y" if shown == result or teacher.random() < SLOPPY else "n"
        said += [_conversation(f"{part}=", str(told)), _conversation(f"{part}={shown}!", verdict)]
    counted = results[:-1] if teacher.random() < SLOPPY else results
    return [
        _conversation(f"{joined(numbers)}?", " ".join(plan)),
        *said,
        _conversation(f"{joined(results)}~", str(sum(counted))),
    ]


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, teacher = random.Random(SEED), random.Random(SEED)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < sum(COUNTS.values()):
        drawn[tuple(chance.randint(0, 9) for _ in range(DIGITS))] = None
    everything = iter(drawn)
    output_dir.mkdir(parents=True, exist_ok=True)
    for use, count in COUNTS.items():
        own = [next(everything) for _ in range(count)]
        _write_lines(
            output_dir / f"{use}.jsonl",
            (
                {"id": f"{use}-{number}", "input": {"question": joined(each)}, "answer": str(sum(each))}
                for number, each in enumerate(own)
            ),
        )
        if use == "train":
            shown = (line for each in own for line in demonstrations(each, teacher))
            _write_lines(output_dir / "demonstrations.jsonl", shown)


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
