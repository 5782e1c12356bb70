"""What the cells come to: a line for each case, its verdict, and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks import outcome
from benchmarks.exchange.convergence.cases import Case, Cell, Learned, Task
from benchmarks.exchange.convergence.verdicts import NOISE, Verdict, spread_of, verdict_of

MIN_RATIO = 50.0
"""Bytes of float32 for each byte that DGC sends, at least, for what is claimed of it."""
UNITS = {Task.TEXT: "nats", Task.ARITHMETIC: "of the reward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A case and its results.

    Attributes:
        case: It.
        learned: By seed.
        spread: Of the final figures over the seeds; None with one seed.
        verdict: Beside its dense case; None of a dense one, and where that has no spread.
        ratio: Bytes that its dense case sends for each byte of its own, over the whole run.
        late_ratio: The same of the second half, when ratios have grown.
        distance: How far its weights end from those of its dense case with the same seed, by how far these went, in the
            mean over the seeds: ||W_c - W|| / ||W - W_0||; None of a dense one, and where weights were not kept.
    """

    case: Case
    learned: Mapping[int, Learned]
    spread: float | None
    verdict: Verdict | None
    ratio: float
    late_ratio: float
    distance: float | None = None

    @property
    def final(self) -> float:
        """Mean over the seeds."""
        return fmean(one.final for one in self.learned.values())


def lines_of(
    cases: Sequence[Case],
    learned: Mapping[str, Mapping[int, Learned]],
    distances: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> list[Line]:
    """Makes the lines of a task.

    Args:
        cases: Of one task, the dense ones among them.
        learned: By name of the case and seed.
        distances: From the weights of the dense case, by name of the case, of each seed.
    """
    return [_line(case, learned, distances.get(case.name, ())) for case in cases]


def _line(case: Case, learned: Mapping[str, Mapping[int, Learned]], distances: Sequence[float]) -> Line:
    own, dense = learned[case.name], learned[case.dense or case.name]
    finals = {seed: one.final for seed, one in own.items()}
    of_dense = {seed: one.final for seed, one in dense.items()}
    verdict = None
    if case.dense and len(dense) > 1:
        verdict = verdict_of(finals, of_dense, higher_is_better=case.task is Task.ARITHMETIC)
    return Line(
        case=case,
        learned=own,
        spread=spread_of(list(finals.values())) if len(finals) > 1 else None,
        verdict=verdict,
        ratio=_mean(dense, lambda one: one.sent_bytes) / _mean(own, lambda one: one.sent_bytes),
        late_ratio=_mean(dense, lambda one: one.late_sent_bytes) / _mean(own, lambda one: one.late_sent_bytes),
        distance=fmean(distances) if distances else None,
    )


def _mean(learned: Mapping[int, Learned], figure: Callable[[Learned], float]) -> float:
    return fmean(figure(one) for one in learned.values())


def claims_of(lines: Sequence[Line]) -> list[outcome.Claim]:
    """Returns claims of the cases that are to be within noise, and of how little DGC sends."""
    found = []
    for line in lines:
        case = line.case
        if not case.claimed:
            continue
        if line.verdict is not None:
            name = f"{case.task}: {case.name} worse than {case.dense}, in spreads of its seeds"
            found.append(outcome.claim(name, line.verdict.spreads, "spreads", goal=NOISE, better="lower"))
        if case.exchange["codec"] == "dgc":
            name = f"{case.task}: {case.name}, fewer bytes than {case.dense}"
            found.append(outcome.claim(f"{name}, whole run", line.ratio, "x", goal=MIN_RATIO, better="higher"))
            found.append(outcome.claim(f"{name}, second half", line.late_ratio, "x", goal=MIN_RATIO, better="higher"))
    return found


def raw_of(cells: Sequence[tuple[Cell, Learned]]) -> list[dict[str, Any]]:
    """Writes down every cell."""
    return [
        {
            "case": cell.case.name,
            "seed": cell.seed,
            "learning_rate": cell.rate,
            "exchange": cell.exchange,
            "optimizer": dict(cell.case.optimizer),
            "final": round(learned.final, 5),
            "held_out": learned.held_out,
            "sent_bytes_per_step": round(learned.sent_bytes),
            "sent_bytes_per_step_second_half": round(learned.late_sent_bytes),
            "events": list(learned.events),
            "seconds": learned.seconds,
            "curve": [(step, round(value, 5)) for step, value in learned.curve],
        }
        for cell, learned in cells
    ]
