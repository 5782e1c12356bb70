"""Writes the task files of the orders example: messages in which people change their minds, and their orders.

The demonstrations imitate a hasty clerk, who usually writes down the first version ("two no wait three lamps") and so
gets the corrected field wrong. The model improves on that through rewards.

Invariant: no message occurs twice, so no validation message is among the training tasks or the demonstrations.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from words import CITIES, COUNTS, ITEMS, NAMES

TRAIN_TASKS, VALIDATION_TASKS = 4000, 200
CHANGED = 0.3
"""Probability that a person corrects a field, for each of the three that can be corrected."""
OVERHEARD = 0.7
"""Probability that the clerk misses a correction."""
SEED = 1
GREETINGS = (
    "hello this is {name}",
    "hi {name} here",
    "good morning {name} speaking",
    "{name} here",
    "my name is {name}",
)
WISHES = ("please send me", "i need", "i want to order", "we are out of {item0} so please ship", "i would like")
PLACES = ("to", "deliver them in", "ship them to", "and deliver it to")
BACK = ("no", "sorry", "no wait", "no make that", "sorry i mean", "or rather")
ENDINGS = ("", "thanks", "thank you", "bye", "thank you and bye")


def message(chance: random.Random) -> tuple[str, dict[str, str], dict[str, str]]:
    """Draws a message; returns it, the final order, and the first versions of corrected fields."""
    order = {"name": chance.choice(NAMES)}
    first: dict[str, str] = {}
    said: dict[str, str] = {}
    for field, words in (("count", COUNTS), ("item", ITEMS), ("city", CITIES)):
        before, order[field] = chance.sample(words, 2)
        said[field] = order[field]
        if chance.random() < CHANGED:
            first[field] = before
            said[field] = f"{before} {chance.choice(BACK)} {order[field]}"
    wish = chance.choice(WISHES).format(item0=chance.choice(ITEMS))
    parts = [
        chance.choice(GREETINGS).format(name=order["name"]),
        wish, said["count"], said["item"], chance.choice(PLACES), said["city"], chance.choice(ENDINGS),
    ]  # fmt: skip
    return " ".join(part for part in parts if part), order, first


def written(order: Mapping[str, str]) -> str:
    """Renders an order."""
    return " ".join(f"{field}: {value}" for field, value in order.items())


def demonstration(
    text: str, order: Mapping[str, str], first: Mapping[str, str], clerk: random.Random
) -> dict[str, Any]:
    """Renders the hasty clerk's demonstration."""
    heard = {field: first[field] for field in first if clerk.random() < OVERHEARD}
    answer = written({**order, **heard})
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance, clerk = random.Random(SEED), random.Random(SEED)
    drawn: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    while len(drawn) < TRAIN_TASKS + VALIDATION_TASKS:
        text, order, first = message(chance)
        drawn[text] = (order, first)
    everything = [(text, order, first) for text, (order, first) in drawn.items()]
    train, held_out = everything[:TRAIN_TASKS], everything[TRAIN_TASKS:]
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("validation", held_out)):
        tasks = ({"id": f"{name}-{i}", "input": {"message": t}, "order": o} for i, (t, o, _) in enumerate(part))
        _write_lines(output_dir / f"{name}.jsonl", tasks)
    _write_lines(output_dir / "demonstrations.jsonl", (demonstration(*each, clerk) for each in train))


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "tasks")
    write(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
