"""What is measured on one line: steps of every contender, in turn and many times, and transfers without computing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from benchmarks.exchange.contenders import AUTO, COMPUTE, CONTENDERS, GRPC_NONE, By, Contender
from benchmarks.exchange.lines import Line
from benchmarks.exchange.stand import Stand, say

WARM_STEPS = 3
"""Before a line is shaped: DDP rebuilds its buckets after the first, its PowerSGD begins with the third."""
CHOICE_STEPS = 60
"""In which `auto` has to have chosen."""
LINE_BYTES = {True: 200_000_000, False: 4_000_000}
TRANSFERS = {"none, gRPC": GRPC_NONE, "none": CONTENDERS["none"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How much is measured.

    Attributes:
        worlds: Numbers of ranks.
        trials: Turns of each contender.
        steps: That count, in each turn.
        slow_s: A contender whose step takes longer has one step in each turn; the first of several does not count.
        transfers: Of all gradients without computing, for each link.
        short: Whether only the contenders of the short form are measured.
    """

    worlds: Sequence[int] = (2, 4)
    trials: int = 3
    steps: int = 2
    slow_s: float = 2.0
    transfers: int = 3
    short: bool = False

    def contenders(self, line: Line) -> list[Contender]:
        """Returns who is measured on a line."""
        return [
            each
            for each in CONTENDERS.values()
            if (each.short or not self.short) and not (each.slow and line.latency_ms)
        ]


LONG = Form()
SHORT = Form(worlds=(2,), trials=1, steps=2, slow_s=1.0, transfers=1, short=True)


@dataclass(slots=True)
class Taken:
    """What was seen of one contender.

    Attributes:
        steps: Those that count: seconds of the slowest rank, by what they went into.
        turns: Of each turn: CPU seconds and bytes for each rank and step, and what the exchange told of a step.
        digests: Of the weights of all ranks, after each turn.
        events: Of the exchange.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    digests: list[tuple[str, ...]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


class Turns:
    """The turns of all contenders on one line."""

    def __init__(self, stand: Stand, line: Line, world_size: int, form: Form) -> None:
        self._stand = stand
        self._line = line
        self._world_size = world_size
        self._form = form
        self.taken: dict[str, Taken] = {}

    def take(self, contender: Contender, count: int) -> float:
        """Has steps taken; returns the seconds of the last."""
        used_s = self._stand.servers_cpu_s()
        answers = self._stand.order("steps", contender=contender.name, count=count)
        used_s = self._stand.servers_cpu_s() - used_s
        steps = [
            {key: max(answer["steps"][number][key] for answer in answers) for key in answers[0]["steps"][0]}
            for number in range(count)
        ]
        taken = self.taken.setdefault(contender.name, Taken())
        # The first finds queues and caches as the one before it has left them.
        taken.steps += steps[1:] if count > 1 or steps[0]["step_s"] < self._form.slow_s else steps
        ranks = len(answers)
        sent = sum(answer["sent_bytes"] for answer in answers) / ranks
        taken.turns.append(
            {
                "cpu_s": (sum(answer["cpu_s"] for answer in answers) + used_s) / ranks / count,
                # The loopback interface is one for all.
                "sent_bytes": sent / count / (ranks if self._line.mbit is None else 1),
                "figures": {key: each / count for key, each in answers[0]["figures"].items()},
            }
        )
        taken.digests.append(tuple(answer["digest"] for answer in answers))
        taken.events += answers[0]["events"]
        return steps[-1]["step_s"]

    def warm_up(self, contenders: Sequence[Contender]) -> None:
        """Has everything opened and used once, before the line is shaped."""
        for contender in contenders:
            if not contender.chooses:
                self.take(contender, WARM_STEPS)
        self.taken.clear()

    def choose(self, contender: Contender) -> dict[str, Any]:
        """Runs a contender until it has chosen a codec; returns the choice and its cost."""
        began, steps = time.monotonic(), 0
        while steps < CHOICE_STEPS and not any("compression pays" in text for text in self._events(contender)):
            self.take(contender, 1)
            steps += 1
        events = self._events(contender)
        self.taken.pop(contender.name)
        return {"steps": steps, "seconds": time.monotonic() - began, "events": events}

    def _events(self, contender: Contender) -> list[str]:
        return list(self.taken[contender.name].events) if contender.name in self.taken else []

    def all(self, contenders: Sequence[Contender]) -> None:
        """Measures all, each in turn."""
        form, counts = self._form, dict[str, int]()
        for contender in contenders:
            seconds = self.take(contender, 1)
            counts[contender.name] = 1 if seconds >= form.slow_s else form.steps + 1
        for trial in range(form.trials):
            for contender in contenders:
                count = counts[contender.name]
                # One that is slow has taken a step that counts in the turn before these.
                if len(self.taken[contender.name].steps) < form.trials * max(1, count - 1):
                    self.take(contender, count)
            say(f"  {self._line.text}, {self._world_size} ranks: turn {trial + 1} of {form.trials}")


def run(line: Line, form: Form) -> dict[str, Any]:
    """Measures on one line; returns what was found, by number of ranks."""
    found: dict[str, Any] = {}
    for world_size in form.worlds:
        began = time.monotonic()
        with Stand(line, world_size) as stand:
            found[str(world_size)] = _on(stand, line, world_size, form)
        say(f"{line.text}, {world_size} ranks: took {time.monotonic() - began:.0f} s")
    return found


def _on(stand: Stand, line: Line, world_size: int, form: Form) -> dict[str, Any]:
    contenders = form.contenders(line)
    turns = Turns(stand, line, world_size, form)
    say(f"{line.text}, {world_size} ranks: {len(contenders)} contenders")
    turns.warm_up(contenders)
    stand.shape()
    mbit = max(answer["mbit"] for answer in stand.order("line", size=LINE_BYTES[line.mbit is None]))
    choice = turns.choose(AUTO) if AUTO in contenders else None
    turns.all(contenders)
    transfers = {}
    for name, contender in TRANSFERS.items():
        if contender in contenders:
            answers = stand.order("transfer", contender=name, count=form.transfers)
            transfers[name] = [max(each) for each in zip(*(one["seconds"] for one in answers), strict=True)]
    stand.order("end")
    compute_s = median(step["step_s"] for step in turns.taken[COMPUTE.name].steps)
    return {
        "line_measured_mbit": round(mbit, 1),
        "contenders": {each.name: summary(each, turns.taken[each.name], compute_s=compute_s) for each in contenders},
        "choice": choice,
        "transfers_s": transfers,
    }


def summary(contender: Contender, taken: Taken, *, compute_s: float) -> dict[str, Any]:
    """Summarises what was seen of one contender.

    Args:
        contender: Who.
        taken: What was seen; at least one step.
        compute_s: Seconds of a step without any exchange.
    """
    step_s = median(step["step_s"] for step in taken.steps)
    digests_equal = all(len(set(each)) == 1 for each in taken.digests)
    found: dict[str, Any] = {
        "step_s": spread([step["step_s"] for step in taken.steps]),
        "exchange_share": round(max(0.0, 1.0 - compute_s / step_s), 4),
        "cpu_s": spread([turn["cpu_s"] for turn in taken.turns]),
        "sent_bytes": round(median(turn["sent_bytes"] for turn in taken.turns)),
        "weights_equal": None if contender.by is By.NOBODY else digests_equal,
    }
    if contender.by is By.FULMEN:
        found["exchange_s"] = spread([step["exchange_s"] for step in taken.steps])
        found["figures"] = _medians([turn["figures"] for turn in taken.turns])
        found["events"] = taken.events
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, quartiles and number of values."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4), "count": len(values)}


def _medians(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = sorted({key for each in dicts for key in each})
    return {key: round(median(each[key] for each in dicts if key in each), 4) for key in keys}
