"""SIMULATED rounds of an aggregator whose ranks do not take the same time: what waiting for a quorum alone gains.

A rank computes, sends its payload and waits for the reply; the round closes when a quorum has arrived. Who comes late
is refused, keeps what it had sent for the next time, takes the newest weights and begins again at once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """How long computing takes, as a multiple of its median.

    Attributes:
        spread: Standard deviation of its logarithm.
        slow_share: Probability that a step is slow.
        slow_factor: By how much it is then.
    """

    spread: float
    slow_share: float = 0.0
    slow_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Results of a simulation.

    Attributes:
        round_s: Seconds of a round, in the mean.
        accepted: Share of the ranks whose payload a round had in it, in the mean.
        late: Share of all payloads that came late.
    """

    round_s: float
    accepted: float
    late: float

    @property
    def payloads_per_s(self) -> float:
        """Payloads that went into a sum, for each rank and second."""
        return self.accepted / self.round_s


def simulate(
    *, world_size: int, compute_s: float, exchange_s: float, jitter: Jitter, quorum: float, rounds: int, seed: int = 0
) -> Rounds:
    """Plays rounds, event by event.

    Args:
        world_size: Ranks.
        compute_s: Median seconds of computing a step.
        exchange_s: Seconds of an exchange without waiting, half of them up, half down.
        jitter: Of the computing.
        quorum: Share of the ranks for which a round waits.
        rounds: How many.
        seed: Of the times.
    """
    rng, needed, way_s = np.random.default_rng(seed), ceil(quorum * world_size), exchange_s / 2

    def takes_s() -> float:
        slow = jitter.slow_factor if jitter.slow_share and rng.random() < jitter.slow_share else 1.0
        return compute_s * slow * float(np.exp(rng.normal(0.0, jitter.spread)))

    # When a payload arrives, of which rank, and for which round it was made.
    arrivals = [(takes_s() + way_s, rank, 0) for rank in range(world_size)]
    heapq.heapify(arrivals)
    number, waiting, accepted, late, closed_s = 0, list[int](), 0, 0, 0.0
    while number < rounds:
        now_s, rank, made_for = heapq.heappop(arrivals)
        if made_for != number:
            late += 1
            heapq.heappush(arrivals, (now_s + way_s + takes_s() + way_s, rank, number))
            continue
        waiting.append(rank)
        if len(waiting) < needed:
            continue
        number, closed_s, accepted = number + 1, now_s, accepted + len(waiting)
        for each in waiting:
            heapq.heappush(arrivals, (now_s + way_s + takes_s() + way_s, each, number))
        waiting = []
    return Rounds(
        round_s=closed_s / rounds, accepted=accepted / (rounds * world_size), late=late / max(1, late + accepted)
    )
