"""Trains tiny models on five games: a short imitation, then reinforcement learning with the defaults.

    python -m benchmarks.train.games
    python -m benchmarks.train.games --games search maze --shapes qwen3 --seeds 1 --set learning_rate=1e-3

Each line is one game, shape and seed: the reward of greedy play on validation tasks before and after, its best, and the
share of the gap between imitation and perfect play that was closed. The weights after imitation are kept in `--cache`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.train.games.training import RULES, Job, played
from benchmarks.train.learning import CACHE, emit

SHAPES = ("llama", "qwen3")
SEEDS = (1, 2, 3)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=list(RULES.GAMES), choices=list(RULES.GAMES))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--set", action="append", default=[], help="setting=value other than the default")
    parser.add_argument("--first", action="append", default=[], help="the same of imitation")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, of one core each")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--output", type=Path, help="file to which the lines are appended")
    parser.add_argument("--steps", action="store_true", help="prints each step")
    given = parser.parse_args()
    jobs = [
        Job(
            game=game,
            shape=shape,
            seed=seed,
            cache=given.cache,
            settings=_assigned(given.set),
            imitation=_assigned(given.first),
            quiet=not given.steps,
        )
        for seed in given.seeds
        for game in given.games
        for shape in given.shapes
    ]
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(played, job) for job in jobs]):
            line = done.result()
            emit(line)
            if given.output:
                with given.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _assigned(texts: list[str]) -> dict[str, Any]:
    found = {}
    for text in texts:
        setting, _, value = text.partition("=")
        found[setting] = tomllib.loads(f"value = {value}")["value"]
    return found


if __name__ == "__main__":
    main()
