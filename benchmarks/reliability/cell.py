"""One cell of the matrix: a run is started, its victims are harmed, and its books are read when it has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.reliability.faults import Harm
from benchmarks.reliability.plan import Cell, Fault, Victim
from benchmarks.reliability.stand import Stand, StandFailed, send
from benchmarks.reliability.watch import Progress, Watch
from benchmarks.reliability.workload import Verdict, Workload

__all__ = ["LIMIT_S", "run_cell"]

LIMIT_S: Final = 30.0
"""Within which work must go on after a fault."""
ROLLOUTS, STEPS = 16, 2
"""After which work has surely gone on: more than can have been under way, as long as the fault lasted."""
UNDER_WAY_LIMIT_S: Final = 300.0
GIVE_UP_S: Final = 90.0
END_LIMIT_S: Final = 150.0
FIRST_STEP: Final = 2
INTERVAL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When a fault began and ended, `time.monotonic`, and what was seen of it."""

    began: float
    over: float
    ready_s: float | None = None
    """Seconds from `fulmen up` by hand to a ready stack; None if nothing was done by hand."""


async def run_cell(stand: Stand, workload: Workload, cell: Cell) -> dict[str, Any]:
    """Runs a cell to its end.

    Returns:
        Its figures, JSON-ready. `broken` is True if the stack should not be used again.

    Raises:
        StandFailed: if no run gets under way before any harm is done.
    """
    name = f"{cell.key.lower().replace('/', '-').replace('+', '-').replace('_', '-')}-{os.urandom(2).hex()}"
    run = await workload.start(name, cell.victims)
    harm = Harm(stand, cell)
    async with Watch(stand, workload, run, victims=cell.victims) as watch:
        await _until(lambda: watch.progress.step >= FIRST_STEP, UNDER_WAY_LIMIT_S, watch.progress)
        if watch.progress.step < FIRST_STEP:
            raise StandFailed(f"{run} is not under way: {watch.progress.failure or 'no step'}")
        await harm.find()
        await watch.begin_fault()
        began = time.monotonic()
        await harm.inflict()
        times = await _operator(stand, cell, harm, began=began)
        went_on = await _went_on(watch.progress, times.over)
        watch.end_fault()
        workload.hurry()
        await _ended(watch.progress)
    ended = watch.progress.succeeded
    verdict = await _judged(workload, run, ended=ended, harm=harm)
    return _figures(cell, watch, times, verdict, harm=harm, went_on=went_on, ended=ended)


async def _operator(stand: Stand, cell: Cell, harm: Harm, *, began: float) -> Times:
    """Does what a person, or systemd, does: `fulmen up`, if nothing is left of the stack."""
    over = time.monotonic()
    if Victim.SUPERVISOR not in cell.victims or cell.fault not in {Fault.KILL, Fault.TWICE, Fault.TERM}:
        return Times(began=began, over=over)
    if cell.fault is Fault.TWICE:
        # The second death comes while the stack starts.
        starting = asyncio.create_task(stand.up(), name="first-up")
        while (pid := await stand.pid(Victim.SUPERVISOR)) in (None, harm.pids[Victim.SUPERVISOR]):
            await asyncio.sleep(INTERVAL_S)
        await asyncio.sleep(1.0)
        send(pid, signal.SIGKILL)
        await asyncio.gather(starting, return_exceptions=True)
        over = time.monotonic()
    return Times(began=began, over=over, ready_s=round(await stand.up(), 1))


async def _until(holds: Any, limit_s: float, progress: Progress | None) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline or (progress is not None and progress.ended):
            return False
        await asyncio.sleep(INTERVAL_S)
    return True


async def _ended(progress: Progress) -> None:
    """Waits until a run has ended, for as long as it takes steps: on a busy machine it takes longer."""
    seen = -1

    def moved() -> bool:
        return progress.ended or len(progress.steps) != seen

    while moved() and not progress.ended:
        seen = len(progress.steps)
        await _until(moved, END_LIMIT_S, None)


async def _went_on(progress: Progress, over: float) -> bool:
    """Waits until rollouts and steps that cannot have been under way have finished after the end of a fault."""

    def both() -> bool:
        return None not in (_after(progress.finished, over, ROLLOUTS), _after(progress.steps, over, STEPS))

    return await _until(both, GIVE_UP_S, progress)


def _after(seen: list[tuple[float, int]], moment: float, more: int) -> float | None:
    """Returns seconds from a moment to the time at which so many more had been done; None if they were not.

    What is done again, from a checkpoint, counts again.
    """
    pairs = zip([(0.0, 0), *seen], seen, strict=False)
    for (_, before), (at, number) in pairs:
        if at > moment:
            more -= max(0, number - before)
            if more <= 0:
                return at - moment
    return None


async def _judged(workload: Workload, run: str, *, ended: bool, harm: Harm) -> Verdict:
    try:
        return await workload.judge(run, ended=ended)
    except (TimeoutError, AssertionError, OSError) as error:
        harm.notes.append(f"its books cannot be read: {type(error).__name__} {error}"[:300])
        return Verdict(retried={}, problems=("unread",))


def _figures(
    cell: Cell, watch: Watch, times: Times, verdict: Verdict, *, harm: Harm, went_on: bool, ended: bool
) -> dict[str, Any]:
    progress = watch.progress
    rollouts_s, steps_s = (
        _after(progress.finished, times.over, ROLLOUTS),
        _after(progress.steps, times.over, STEPS),
    )
    noticed = None if cell.fault is Fault.NONE else watch.noticed
    notes = [*harm.notes, *watch.blind, *([progress.failure] if progress.failure else [])]
    good = (
        went_on
        and ended
        and not watch.blind
        and not (verdict.lost or verdict.doubled or verdict.skipped or verdict.trained_twice)
    )
    return {
        "key": cell.key,
        "victims": [str(victim) for victim in cell.victims],
        "fault": str(cell.fault),
        "fault_s": round(times.over - times.began, 1),
        "detected_s": None if noticed is None else round(noticed[0] - times.began, 1),
        "detected_by": "" if noticed is None else noticed[1],
        "next_rollout_s": _rounded(_after(progress.finished, times.over, 1)),
        "next_step_s": _rounded(_after(progress.steps, times.over, 1)),
        "rollouts_s": _rounded(rollouts_s),
        "steps_s": _rounded(steps_s),
        "rollouts_during": _during(progress.finished, times),
        "steps_during": _during(progress.steps, times),
        "ready_by_hand_s": times.ready_s,
        **verdict.as_dict(),
        "run_ended": ended,
        "within_limit": rollouts_s is not None and steps_s is not None and max(rollouts_s, steps_s) < LIMIT_S,
        "holds": good and not verdict.problems,
        "notes": notes,
        "broken": not good,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _during(seen: list[tuple[float, int]], times: Times) -> int:
    """Counts what finished while a fault lasted."""
    before = max((number for at, number in seen if at <= times.began), default=0)
    until = max((number for at, number in seen if at <= times.over), default=0)
    return max(0, until - before)
