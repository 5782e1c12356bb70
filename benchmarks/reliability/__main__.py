"""Runs the crash matrix, or power cuts, and writes what it measured: `make crash-matrix`.

    python -m benchmarks.reliability [--short] [--victim V ...] [--fault F ...] [--resume] [--output FILE]
    python -m benchmarks.reliability --power-cuts 20 | --stack-cuts 5

It runs in namespaces of its own (network, mounts, processes), which it makes as root: nothing outside is touched, and nothing is
left when it ends, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.cell import run_cell
from benchmarks.reliability.faults import missing_for
from benchmarks.reliability.page import write_page
from benchmarks.reliability.plan import FULL, SHORT, Cell, Fault, Victim
from benchmarks.reliability.power import cut_power, cut_stacks
from benchmarks.reliability.results import Results
from benchmarks.reliability.stand import RUNNERS, SLOTS, Stand, StandFailed, short_folder
from benchmarks.reliability.workload import STEPS, Workload

INSIDE = "FULMEN_MATRIX_INSIDE"
POWER_CUTS = 20
TYPICAL_S = 35.0
"""Of a cell, before the first is measured."""
RESULTS = Path(__file__).parents[1] / "results" / "crash_matrix.json"
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def main() -> None:
    """Reads the command line, goes into namespaces, and runs."""
    given = _arguments(sys.argv[1:])
    if os.geteuid() == 0 and INSIDE not in os.environ:
        _into_namespaces()
    if INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # Shared memory outlives namespaces of processes, and libfaketime names its own by process ids.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "fulmen-matrix", "/dev/shm"], check=True)
        del os.environ[INSIDE]
    if given.stack_cuts is not None:
        cuts = asyncio.run(cut_stacks(given.stack_cuts, random.Random(given.seed)))
        sys.exit(0 if all(cut.get("run_ended") for cut in cuts) else 1)
    results = Results(given.output, resume=given.resume)
    if not given.page and given.power_cuts is None:
        asyncio.run(_run(_chosen(given), results))
    if power_cuts := _cuts(given, results):
        asyncio.run(cut_power(power_cuts, results, seed=given.seed))
    if given.output == RESULTS:
        write_page(results.document(), PAGE)
    sys.exit(1 if given.strict and results.shortfalls() else 0)


def _cuts(given: argparse.Namespace, results: Results) -> int:
    """Returns how often the power is to be cut: as given, or with the whole matrix."""
    if given.power_cuts is not None:
        return int(given.power_cuts)
    is_whole = not (given.short or given.page or given.cell or given.victim or given.fault)
    if not is_whole or (given.resume and results.has_power_cuts):
        return 0
    if os.geteuid() != 0:
        _say("Power cuts need root: a disk is mounted over FUSE and a loop device.")
        return 0
    return POWER_CUTS


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make crash-matrix", description=__doc__)
    parser.add_argument("--victim", action="append", choices=list(Victim), help="only cells with this one")
    parser.add_argument("--fault", action="append", choices=list(Fault), help="only cells of this one")
    parser.add_argument("--cell", action="append", metavar="KEY", help="only this one, such as store+llm_proxy/kill")
    parser.add_argument("--short", action="store_true", help="the two cells that the gate runs")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cells of this commit that the output has, and run the others"
    )
    parser.add_argument("--output", type=Path, help=f"JSON; by default {RESULTS.name} and its page, but with --short")
    parser.add_argument("--power-cuts", type=int, metavar="N", help="only cut the power, N times")
    parser.add_argument(
        "--stack-cuts", type=int, metavar="N", help="only cut the power of whole stacks, N times; keeps no figures"
    )
    parser.add_argument("--seed", type=int, default=20261126, help="of the moments of power cuts")
    parser.add_argument("--page", action="store_true", help="only write docs/reliability.md from the results")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a cell falls short")
    found = parser.parse_args(given)
    if found.output is None and not found.short:
        found.output = RESULTS
    return found


def _into_namespaces() -> None:
    """Executes this program again in namespaces of its own, below a shell that reaps what daemons leave."""
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "benchmarks.reliability", *sys.argv[1:]]
    if shutil.which("unshare") is None:
        return
    os.environ[INSIDE] = "1"
    os.execvp(command[0], command)  # No shell is wanted.


def _chosen(given: argparse.Namespace) -> list[Cell]:
    cells = SHORT if given.short else FULL
    return [
        cell
        for cell in cells
        if (not given.cell or cell.key in given.cell)
        and (not given.victim or any(victim in given.victim for victim in cell.victims))
        and (not given.fault or cell.fault in given.fault)
    ]


async def _run(cells: Sequence[Cell], results: Results) -> None:
    """Runs cells one after another, on one stack for as long as it stays sound and of the right kind."""
    left = [cell for cell in cells if not results.has(cell.key)]
    _say(f"{len(left)} of {len(cells)} cells, about {len(left) * TYPICAL_S / 60:.0f} minutes")
    stand: Stand | None = None
    workload: Workload | None = None
    taken: list[float] = []
    try:
        for number, cell in enumerate(left, start=1):
            if reason := missing_for(cell.fault):
                results.skip(cell, reason)
                continue
            began = time.monotonic()
            if stand is not None and stand.kind != cell.stack:
                await stand.down()
                stand = None
            try:
                if stand is None or workload is None:
                    stand = Stand(short_folder("fulmen-matrix-"), kind=cell.stack)
                    workload = Workload(stand)
                    await stand.up()
                await stand.healthy()
                figures = await run_cell(stand, workload, cell)
            except (StandFailed, AssertionError, TimeoutError) as error:
                figures = {"key": cell.key, "victims": list(cell.victims), "fault": cell.fault, "broken": True}
                figures |= {"holds": False, "within_limit": False, "notes": [f"no harm was done: {error}"[:400]]}
            broken = figures.pop("broken")
            results.add(figures, settings={"runners": RUNNERS, "slots": SLOTS, "steps": STEPS})
            taken.append(time.monotonic() - began)
            rest_min = (len(left) - number) * sum(taken) / len(taken) / 60
            _say(f"[{number}/{len(left)}, {rest_min:.0f} min left] {_line(figures)}")
            if broken and stand is not None:
                await stand.down()
                stand = None
    finally:
        if stand is not None:
            await stand.down()


def _line(figures: dict[str, Any]) -> str:
    if "created" not in figures:
        return f"{figures['key']}: {'; '.join(figures['notes'])}"
    return (
        f"{figures['key']}: detected {figures['detected_s']} s ({figures['detected_by'] or 'by nothing'}), rollouts "
        f"{figures['rollouts_s']} s, steps {figures['steps_s']} s, lost {figures['lost']}, doubled "
        f"{figures['doubled']}, skipped {figures['skipped']}, twice {figures['trained_twice']}, failed {figures['failed']}, "
        f"run {'ended' if figures['run_ended'] else 'DID NOT END'}{'' if figures['holds'] else ' !'} "
        f"{' '.join('; '.join([*figures['notes'], *figures['problems']]).split())[:400]}"
    )


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
