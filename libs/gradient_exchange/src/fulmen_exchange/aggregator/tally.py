"""What a shard has answered and how long its rounds took, counted for those who watch it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from fulmen_exchange.aggregator.effects import PayloadStatus
from fulmen_exchange.aggregator.rounds import RoundMachine

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class Tally:
    """Counts of one shard since it was opened.

    Attributes:
        verdicts: What was said of payloads and chunks.
        rounds: Rounds that are over, by the first of `BOUNDS_S` that is not below their seconds; beyond all bounds last.
        seconds: Of all these rounds.
    """

    verdicts: Counter[PayloadStatus] = field(default_factory=Counter)
    rounds: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0
    _counted: int = 0

    def look(self, machine: RoundMachine) -> None:
        """Counts the rounds that are over since it last looked: no sum of a round is missing once the next one begins."""
        over = [record for number, record in machine.records.items() if self._counted < number < machine.round]
        self._counted = max(self._counted, machine.round - 1)
        for record in over:
            if record.sums:
                seconds = record.ended_s - record.began_s
                self.seconds += seconds
                self.rounds[bisect_left(BOUNDS_S, seconds)] += 1
