"""Writes the task files of the code example: functions in English with tests, and conversations of a careless programmer.

The programmer has two habits. Seven times out of ten it ignores the required sign of the numbers. Seven times out of ten
it forgets the default of the largest and the smallest, and three times out of four gives up at the error that an empty
list then raises. The model improves on both through rewards.

Invariants: each function of a validation or test task occurs in no other task. Each function fails a test if one of its
conditions is left out.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from functions import HIDDEN, KINDS, PARTS, PUBLIC, SIGNS, WHOLES, Function
from trial import PASSED, TOOLS, run

USES = {"validation": (100, 100), "test": (200, 200), "train": (420, 2000)}
"""Functions, and tasks: a function of a training task occurs several times, with other tests."""
OVERHEARS, FORGETS, LEAVES = 0.7, 0.7, 0.75
SEED = 1


def task(function: Function, chance: random.Random, name: str) -> dict[str, Any]:
    """Renders a line of a task file."""
    for _ in range(100):
        public, hidden = function.tests(chance, PUBLIC), function.tests(chance, HIDDEN)
        less = [replace(function, sign=""), replace(function, kind="")]
        if all(_differs(function, each, [*public, *hidden]) for each in less if each != function):
            shown = {"function": function.text, "tests": public}
            return {"id": name, "input": shown, "tests": hidden}
    raise ValueError(f"no tests tell {function} from one with fewer conditions")


def _differs(function: Function, other: Function, tests: list) -> bool:
    # Both expressions are ours.
    compute = eval(f"lambda xs: {other.code()}")
    return any(compute(argument) != wanted for argument, wanted in tests)


def demonstration(function: Function, tests: list, programmer: random.Random) -> dict[str, Any]:
    """Renders the conversation of the careless programmer."""
    heard = function.sign if programmer.random() >= OVERHEARS else ""
    right = replace(function, sign=heard).code()
    forgotten = replace(function, sign=heard).code(default=False)
    tried = [right]
    if forgotten != right and programmer.random() < FORGETS:
        tried = [forgotten] if programmer.random() < LEAVES else [forgotten, right]
    messages: list[dict[str, Any]] = [{"role": "user", "content": function.text}]
    result = ""
    for number, code in enumerate(tried):
        arguments = json.dumps({"code": code}, separators=(",", ":"))
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = run(code, tests)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    # The agent ends when all tests pass.
    messages[-1:] = [] if result == PASSED else [messages[-1], {"role": "assistant", "content": "done"}]
    return {"messages": messages, "tools": TOOLS}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, programmer = random.Random(SEED), random.Random(SEED)
    functions = [Function(*each) for each in itertools.product(WHOLES, PARTS, SIGNS, KINDS)]
    chance.shuffle(functions)
    first = 0
    output_dir.mkdir(parents=True, exist_ok=True)
    for use, (different, count) in USES.items():
        own = functions[first : first + different]
        first += len(own)
        drawn = [own[number % len(own)] for number in range(count)]
        tasks = [task(each, chance, f"{use}-{number}") for number, each in enumerate(drawn)]
        _write_lines(output_dir / f"{use}.jsonl", tasks)
        if use == "train":
            shown = (
                demonstration(each, one["input"]["tests"], programmer) for each, one in zip(drawn, tasks, strict=True)
            )
            _write_lines(output_dir / "demonstrations.jsonl", shown)


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
