"""Writes the task files of the calculator example: chains of operations with one model call each.

The calculator computes one operation at a time and shows two digits, 00 to 99; every result of a chain is one of them.
The demonstrations imitate a tired teacher who usually answers after four operations with the intermediate result. A
model that imitates them solves the chains of four; it improves on that through rewards.

Invariant: no validation or test expression occurs among the training tasks or the demonstrations.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRAIN_TASKS, VALIDATION_TASKS, TEST_TASKS = 4000, 100, 200
OPERATIONS = (4, 4, 5, 6, 7)
"""Numbers of operations of a chain; a number listed twice is drawn twice as often."""
SMALLEST, LARGEST = 10, 99
TIRED_AFTER = 4
TIRED = 0.7
SEED = 1
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Adds or subtracts two numbers of two digits.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def problem(chance: random.Random) -> tuple[str, int]:
    """Draws a chain of additions and subtractions, and its value; every result fits the calculator."""
    value = chance.randint(SMALLEST, LARGEST)
    expression = f"{value}"
    for _ in range(chance.choice(OPERATIONS)):
        signed = [n for n in range(-LARGEST, LARGEST + 1) if abs(n) >= SMALLEST and 0 <= value + n <= LARGEST]
        operand = chance.choice(signed)
        expression, value = f"{expression}{operand:+d}", value + operand
    return expression, value


def operations(expression: str) -> list[tuple[str, str]]:
    """Splits a chain into the calculator's inputs and outputs, one operation after the other."""
    first, *rest = re.findall(r"[+-]?\d+", expression)
    value, found = int(first), []
    for operand in rest:
        asked, value = f"{value:02d}{operand}", value + int(operand)
        found.append((asked, f"{value:02d}"))
    return found


def demonstration(expression: str, teacher: random.Random) -> dict[str, Any]:
    """Renders the conversation of the tired teacher."""
    steps = operations(expression)
    if teacher.random() < TIRED:
        steps = steps[:TIRED_AFTER]
    messages: list[dict[str, Any]] = [{"role": "user", "content": expression}]
    for number, (asked, answer) in enumerate(steps):
        arguments = json.dumps({"expression": asked}, separators=(",", ":"))
        function = {"name": "calculator", "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": answer})
    messages.append({"role": "assistant", "content": steps[-1][1]})
    return {"messages": messages, "tools": TOOLS}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, teacher = random.Random(SEED), random.Random(SEED)
    problems: dict[str, int] = {}
    while len(problems) < TRAIN_TASKS + VALIDATION_TASKS + TEST_TASKS:
        problems.update([problem(chance)])
    everything = list(problems.items())
    train, held_out = everything[:TRAIN_TASKS], everything[TRAIN_TASKS:]
    validation, test = held_out[:VALIDATION_TASKS], held_out[VALIDATION_TASKS:]
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("validation", validation), ("test", test)):
        _write_lines(
            output_dir / f"{name}.jsonl",
            ({"id": f"{name}-{i}", "input": {"question": e}, "answer": f"{v:02d}"} for i, (e, v) in enumerate(part)),
        )
    _write_lines(output_dir / "demonstrations.jsonl", (demonstration(e, teacher) for e, _ in train))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
