"""Finished cells, one file each, so that an interrupted benchmark can continue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from benchmarks.exchange.convergence.cases import Cell, Learned, Task
from benchmarks.train.stand import ROOT, say

FOLDER = ROOT / ".fulmen" / "bench-convergence"
WEIGHTS = ".weights"


def read(cell: Cell, folder: Path = FOLDER) -> Learned | None:
    """Returns the results of a cell; None if it is not trained yet."""
    file = folder / cell.file
    if not file.exists():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    curve = [(int(step), float(value)) for step, value in values["curve"]]
    return Learned(**{**values, "curve": curve, "events": tuple(values["events"])})


def write(cell: Cell, learned: Learned, folder: Path = FOLDER) -> None:
    """Stores the results of a cell atomically."""
    file = folder / cell.file
    file.parent.mkdir(parents=True, exist_ok=True)
    values = asdict(learned)
    if (weights := values.pop("weights")) is not None:
        file.with_suffix(WEIGHTS).write_bytes(weights)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values) + "\n", encoding="utf-8")
    part.replace(file)


def read_weights(cell: Cell, folder: Path = FOLDER) -> bytes | None:
    """Returns the weights that a cell ended with; None if they were not kept."""
    file = (folder / cell.file).with_suffix(WEIGHTS)
    return file.read_bytes() if file.exists() else None


def train(cell: Cell) -> Learned:
    """Trains a cell, in this process."""
    import torch  # only those who train need it, and what follows

    torch.set_num_threads(1)
    match cell.case.task:
        case Task.TEXT:
            from benchmarks.exchange.convergence import text

            return text.train(cell)
        case Task.ARITHMETIC:
            from benchmarks.exchange.convergence import arithmetic

            return arithmetic.train(cell)


def complete(cells: Sequence[Cell], *, processes: int, folder: Path = FOLDER) -> None:
    """Trains the cells that are missing, and says so of each."""
    missing = [cell for cell in cells if read(cell, folder) is None]
    say(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before")
    began = perf_counter()
    for number, (cell, learned) in enumerate(_trained(missing, processes), start=1):
        write(cell, learned, folder)
        left = (perf_counter() - began) / number * (len(missing) - number) / 60
        say(
            f"{cell.case.task}: {cell.case.name}, seed {cell.seed}, rate {cell.rate:g}: {learned.final:.4f} after"
            f" {learned.seconds:.0f} s; {len(missing) - number} cells left, about {left:.0f} min"
        )


def _trained(cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, Learned]]:
    if processes == 1:
        yield from ((cell, train(cell)) for cell in cells)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        calls = {pool.submit(train, cell): cell for cell in cells}
        try:
            for call in as_completed(calls):
                yield calls[call], call.result()
        finally:
            pool.shutdown(cancel_futures=True)
