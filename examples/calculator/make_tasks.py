"""Writes the task files of the calculator example: short expressions that a tiny model cannot work out in its head.

Each demonstration is a conversation of two model calls: call the tool with the expression, then repeat its result.

Invariant: no validation expression occurs among the training tasks or the demonstrations.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRAIN_TASKS, VALIDATION_TASKS, DEMONSTRATIONS = 2000, 100, 2000
SEED = 1
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def problem(chance: random.Random) -> tuple[str, int]:
    """Draws an expression of two or three operands, and its value."""
    expression, value = str(first := chance.randrange(2, 100)), first
    for _ in range(chance.randrange(1, 3)):
        operand = chance.randrange(2, 100)
        match chance.choice("+-"):
            case "+":
                expression, value = f"{expression}+{operand}", value + operand
            case _:
                expression, value = f"{expression}-{operand}", value - operand
    return expression, value


def demonstration(expression: str, value: int) -> dict[str, Any]:
    """Renders the conversation of a perfect agent."""
    arguments = json.dumps({"expression": expression}, separators=(",", ":"))
    call = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    messages = [
        {"role": "user", "content": expression},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": str(value)},
        {"role": "assistant", "content": str(value)},
    ]
    return {"messages": messages, "tools": TOOLS}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl and demonstrations.jsonl; the same bytes every time."""
    chance = random.Random(SEED)
    problems: dict[str, int] = {}
    while len(problems) < TRAIN_TASKS + VALIDATION_TASKS:
        problems.update([problem(chance)])
    everything = list(problems.items())
    train, held_out = everything[:TRAIN_TASKS], everything[TRAIN_TASKS:]
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("validation", held_out)):
        _write_lines(
            output_dir / f"{name}.jsonl",
            ({"id": f"{name}-{i}", "input": {"question": e}, "answer": str(v)} for i, (e, v) in enumerate(part)),
        )
    _write_lines(output_dir / "demonstrations.jsonl", (demonstration(e, v) for e, v in train[:DEMONSTRATIONS]))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
