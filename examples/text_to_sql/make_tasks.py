"""Writes the task files of the text-to-SQL example: questions about the databases of a shop, and statements that answer them.

The demonstrations imitate a careless analyst. Seven times out of ten it forgets to join the other tables, and usually
gives up at the error that follows. Seven times out of ten it ignores the second of two conditions. The model improves on
both through rewards.

Invariants: no question occurs twice, and no validation or test question has the form of a training question, that is, the
same statement without values. Each condition of a question changes the rows on one of the task's two databases.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from matching import fault
from questions import Query, draw
from shop import TOOLS, run

COUNTS = {"train": 3000, "validation": 100, "test": 300}
HELD_OUT = 0.2
"""Share of the forms that only validation and test questions have."""
DATABASES = 8
FORGETS_JOIN, GIVES_UP, OVERHEARS = 0.7, 0.7, 0.7
SEED = 1


def task_of(question: str, query: Query, database: int) -> dict[str, Any] | None:
    """Makes a task; None if a statement without one of the conditions would do as well."""
    task = {"input": {"question": question, "database": database}, "query": query.sql()}
    fewer = (
        replace(query, conditions=tuple(c for c in query.conditions if c is not each)) for each in query.conditions
    )
    return task if all(fault(task, each.sql()) for each in fewer) else None


def demonstration(task: Mapping[str, Any], query: Query, analyst: random.Random) -> dict[str, Any]:
    """Renders the conversation of the careless analyst."""
    if len(query.conditions) > 1 and analyst.random() < OVERHEARS:
        query = replace(query, conditions=query.conditions[:-1])
    tried = [query.sql()]
    if query.joined and analyst.random() < FORGETS_JOIN:
        first = query.sql(join=False)
        tried = [first] if analyst.random() < GIVES_UP else [first, *tried]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["input"]["question"]}]
    for number, sql in enumerate(tried):
        function = {"name": "query", "arguments": json.dumps({"sql": sql}, separators=(",", ":"))}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = str(run(sql, task["input"]["database"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    messages.append({"role": "assistant", "content": "done"})
    return {"messages": messages, "tools": TOOLS}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, analyst = random.Random(SEED), random.Random(SEED)
    drawn: dict[str, list[tuple[dict[str, Any], Query]]] = {use: [] for use in COUNTS}
    held_out: dict[object, bool] = {}
    known: set[str] = set()
    while missing := [use for use in COUNTS if len(drawn[use]) < COUNTS[use]]:
        question, query = draw(chance)
        use = "train"
        if held_out.setdefault(query.form, chance.random() < HELD_OUT):
            use = "validation" if "validation" in missing else "test"
        task = task_of(question, query, chance.randint(1, DATABASES))
        if task and use in missing and question not in known:
            known.add(question)
            drawn[use].append(({"id": f"{use}-{len(drawn[use])}", **task}, query))
    output_dir.mkdir(parents=True, exist_ok=True)
    for use, tasks in drawn.items():
        _write_lines(output_dir / f"{use}.jsonl", (task for task, _ in tasks))
    _write_lines(output_dir / "demonstrations.jsonl", (demonstration(*each, analyst) for each in drawn["train"]))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
