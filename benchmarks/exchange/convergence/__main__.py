"""Benchmark of convergence: every codec beside a dense exchange, with equal steps, data and first weights.

Method: two tasks. Text: a transformer of 0.56 M parameters learns the source of Python's standard library byte by byte,
four ranks of one process, 400 steps, loss on held-out files. Arithmetic: GRPO on the example of that name with two ranks
in processes of their own (four in some cases), 40 training steps (160 of the optimiser), mean reward of the last 10. Ratios grow over the
first tenth of the rounds. Each case is held, seed by seed, against the dense exchange with the same optimiser (SGD with
momentum 0.9 where DGC holds the momentum itself); the unit is the sample standard deviation of the dense exchange over
its seeds, and a mean difference of at most one is within noise. Learning rates were chosen on a seed that is not
reported. Bytes are those that a rank sends in a step: payloads, vectors that are sent as they are, and what rounds ask.

Run `python -m benchmarks.exchange.convergence [--short] [--only TASK ...] [--seeds N] [--tune] [--processes N] [--output FOLDER]
[--doc FILE]`. Finished cells are kept in .fulmen/bench-convergence, and an interrupted run continues with the next one;
--anew trains all again. Writes exchange_convergence.json and .png after every task; in the document, all between the two
lines that name this benchmark is replaced. --tune first trains what learning rates were chosen by.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.exchange.convergence import pages, store
from benchmarks.exchange.convergence.cases import (
    CASES,
    SEEDS,
    SHORT_SIZES,
    SIZES,
    SPREAD_SEEDS,
    TUNING_SEED,
    Cell,
    Learned,
    Task,
)
from benchmarks.exchange.convergence.report import Line, claims_of, lines_of, raw_of

NAME = "exchange_convergence"


def cells_of(task: Task, *, short: bool, seeds: int | None = None) -> list[Cell]:
    """Returns what is to be trained of a task: so many seeds of each case, one in the short form."""
    size = (SHORT_SIZES if short else SIZES)[task]
    found = []
    for case in CASES:
        if case.task is task:
            of_case = (SEEDS if case.dense else SPREAD_SEEDS)[: 1 if short else seeds]
            found += [Cell(case=case, seed=seed, size=size, rate=case.rate) for seed in of_case]
    return found


def tuning_cells(task: Task) -> list[Cell]:
    """Returns what learning rates were chosen by."""
    return [
        Cell(case=case, seed=TUNING_SEED, size=SIZES[task], rate=rate)
        for case in CASES
        if case.task is task
        for rate in case.tried
    ]


def finished(cells: Sequence[Cell]) -> list[tuple[Cell, Learned]]:
    """Returns those of the cells that were trained."""
    found = ((cell, store.read(cell)) for cell in cells)
    return [(cell, learned) for cell, learned in found if learned is not None]


def lines_of_task(task: Task, *, short: bool, seeds: int | None = None) -> list[Line]:
    """Reads the lines of a task; none if a cell was not trained yet."""
    cells = cells_of(task, short=short, seeds=seeds)
    trained = finished(cells)
    if len(trained) < len(cells):
        return []
    learned: dict[str, dict[int, Learned]] = {}
    for cell, one in trained:
        learned.setdefault(cell.case.name, {})[cell.seed] = one
    return lines_of([case for case in CASES if case.task is task], learned, distances_of([cell for cell, _ in trained]))


def distances_of(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Returns how far the weights of cells ended from those of their dense case with the same seed, by name of the case."""
    dense = {(cell.case.name, cell.seed): cell for cell in cells if not cell.case.dense}
    found: dict[str, list[float]] = {}
    for cell in cells:
        if cell.case.task is not Task.TEXT or not cell.case.dense:
            continue
        ended, dense_ended = store.read_weights(cell), store.read_weights(dense[cell.case.dense, cell.seed])
        if ended is not None and dense_ended is not None:
            from benchmarks.exchange.convergence.text import distance  # it loads torch

            found.setdefault(cell.case.name, []).append(distance(cell, ended, dense_ended))
    return found


def write(folder: Path, *, short: bool, document: Path | None) -> list[outcome.Claim]:
    """Writes results, picture and document of the tasks that are complete; returns the claims."""
    lines = {task: found for task in Task if (found := lines_of_task(task, short=short))}
    tried = [] if short else [pair for task in lines for pair in finished(tuning_cells(task))]
    claims = [claim for found in lines.values() for claim in claims_of(found)]
    raw: dict[str, Any] = {str(task): raw_of(finished(cells_of(task, short=short))) for task in lines}
    raw["tried"] = raw_of(tried)
    if Task.TEXT in lines:
        from benchmarks.exchange.convergence.text import corpus  # it loads torch

        raw["corpus"] = corpus()
    outcome.save(NAME, method=__doc__ or "", raw=raw, claims=claims, folder=folder, short=short)
    pages.draw(lines, folder / f"{NAME}.png")
    text = pages.markdown(lines, tried)
    sys.stdout.write(text)
    if document is not None:
        pages.replace_part(document, text)
    return claims


def main() -> None:
    """Trains the missing cells and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="a few steps of one seed"
    )
    parser.add_argument("--only", nargs="+", type=Task, choices=list(Task), default=list(Task), help="only these tasks")
    parser.add_argument(
        "--seeds", type=int, choices=range(1, len(SEEDS)), help="a first look at so many seeds: prints the tables alone"
    )
    parser.add_argument("--tune", action="store_true", help="also what learning rates were chosen by")
    parser.add_argument("--processes", type=int, default=2, help="cells that are trained at a time")
    parser.add_argument("--anew", action="store_true", help="forgets the cells that are finished")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help="folder for results and picture")
    parser.add_argument("--doc", type=Path, help="document whose part is replaced")
    given = parser.parse_args()
    if given.anew:
        shutil.rmtree(store.FOLDER, ignore_errors=True)
    claims: list[outcome.Claim] = []
    for task in given.only:
        cells = cells_of(task, short=given.short, seeds=given.seeds)
        store.complete([*(tuning_cells(task) if given.tune else ()), *cells], processes=given.processes)
        if given.seeds is not None:
            sys.stdout.write(pages.markdown({task: lines_of_task(task, short=given.short, seeds=given.seeds)}, ()))
            continue
        claims = write(given.output, short=given.short, document=given.doc)
    outcome.show(None, claims)


if __name__ == "__main__":
    main()
