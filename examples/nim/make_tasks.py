"""Writes the task files of the nim example: heaps with limits, and games of beginners.

Beginners make any move that is allowed. Validation and test games are against perfect players, and can be won; the training
games are played by the model with itself.

Invariant: no training game begins with the board of a validation or test game, and no demonstration shows it.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rules import LIMITS, MOST, moved, moves, read

DEMONSTRATIONS, TRAIN_TASKS = 3000, 1000
HELD_OUT = {"validation": (10, 10), "test": (11, 15)}
"""Boards of each use, and the perfect players that each is played against."""
SEED = 1


def demonstrations(board: str, chance: random.Random) -> list[dict[str, Any]]:
    """Renders every move of a game of two beginners."""
    shown = []
    while moves(board):
        move = chance.choice(moves(board))
        shown.append({"messages": [{"role": "user", "content": board}, {"role": "assistant", "content": move}]})
        board = moved(board, move)
    return shown


def can_be_held_out(board: str) -> bool:
    """True if the first player can win, not by its first move, and larger heaps lead to the board."""
    left, limit = read(board)
    return left % (limit + 1) != 0 and limit < left <= MOST - limit


def write(output_dir: Path) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl; the output is deterministic."""
    chance = random.Random(SEED)
    boards = [f"{left} {limit}" for limit, left in product(LIMITS, range(1, MOST + 1))]
    held_out = chance.sample(list(filter(can_be_held_out, boards)), sum(count for count, _ in HELD_OUT.values()))
    kept = [board for board in boards if board not in held_out]
    output_dir.mkdir(parents=True, exist_ok=True)
    shown = [line for _ in range(DEMONSTRATIONS) for line in demonstrations(chance.choice(kept), chance)]
    shown = [line for line in shown if line["messages"][0]["content"] in kept]
    _write_lines(output_dir / "demonstrations.jsonl", shown[:DEMONSTRATIONS])
    uses = {"train": [(chance.choice(kept), "itself") for _ in range(TRAIN_TASKS)]}
    rest = iter(held_out)
    for use, (count, players) in HELD_OUT.items():
        own = [next(rest) for _ in range(count)]
        uses[use] = [(board, f"perfect {number}") for board, number in product(own, range(players))]
    for use, drawn in uses.items():
        _write_lines(
            output_dir / f"{use}.jsonl",
            (
                {"id": f"{use}-{number}", "input": {"board": board, "against": against}}
                for number, (board, against) in enumerate(drawn)
            ),
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
