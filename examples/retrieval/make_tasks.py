"""Writes the task files of the retrieval example: questions, and conversations of a hasty reader.

The reader has two habits. Seven times out of ten it searches for a name alone, which shows half of what is written about
it, and takes the last word that it sees if the right sentence is missing. Seven times out of ten it answers with the
first thing that it finds, although the question asks for more. The model improves on both through rewards.

Invariant: the libraries of validation and test questions occur nowhere else, so that their answers must be read.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from library import FACTS, TOOLS, facts, search
from wordings import KEY_WORDS, Question, draw

COUNTS = {"train": 2000, "validation": 100, "test": 300}
LIBRARIES = {"train": range(1, 41), "validation": range(41, 51), "test": range(51, 81)}
NAME_ALONE, STOPS = 0.7, 0.7
SEED = 1


def demonstration(question: Question, reader: random.Random) -> dict[str, Any]:
    """Renders the conversation of the hasty reader."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    kinds = question.kinds[:1] if reader.random() < STOPS else question.kinds
    found = question.subject
    for number, kind in enumerate(kinds):
        words = found if reader.random() < NAME_ALONE else f"{found} {KEY_WORDS[kind]}"
        function = {"name": "search", "arguments": json.dumps({"words": words}, separators=(",", ":"))}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        shown = search(question.library, words)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": shown})
        value = facts(question.library).get((kind, found))
        is_shown = value is not None and FACTS[kind][1].format(found, value) in shown.split(" . ")
        found = value if value is not None and is_shown else shown.split()[-1]
    messages.append({"role": "assistant", "content": found})
    return {"messages": messages, "tools": TOOLS}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, reader = random.Random(SEED), random.Random(SEED)
    output_dir.mkdir(parents=True, exist_ok=True)
    for use, count in COUNTS.items():
        drawn: dict[Question, None] = {}
        while len(drawn) < count:
            drawn[draw(chance, chance.choice(LIBRARIES[use]))] = None
        _write_lines(
            output_dir / f"{use}.jsonl",
            (
                {
                    "id": f"{use}-{number}",
                    "input": {"question": each.text, "library": each.library},
                    "answer": each.answer,
                    "facts": len(each.kinds),
                }
                for number, each in enumerate(drawn)
            ),
        )
        if use == "train":
            _write_lines(output_dir / "demonstrations.jsonl", (demonstration(each, reader) for each in drawn))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
