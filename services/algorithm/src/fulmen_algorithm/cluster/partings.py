"""Which machines of a group are left out where some do not reach each other, though the service reaches all of them.

The service alone decides: each of two machines may say that it is the other one that does not answer.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

FIRST_S = 300.0
LONGEST_S = 4800.0


def left_out(partings: Collection[frozenset[str]], processes: Mapping[str, int]) -> list[str]:
    """Returns machines without which all others reach each other.

    A machine that misses more others is left out before one that misses fewer, one with fewer processes before one with more, and
    otherwise the last one. So the first of two alike stays.

    Args:
        partings: Pairs of machines that do not reach each other.
        processes: Number of processes of each machine, in the order of the group.
    """
    order, left, found = list(processes), set(partings), []
    while left:
        misses = Counter(machine for pair in left for machine in pair)
        worst = max(misses, key=lambda machine: (misses[machine], -processes[machine], order.index(machine)))
        found.append(worst)
        left = {pair for pair in left if worst not in pair}
    return found


class LeftOut:
    """Nodes that were left out of a group. They get no processes for a while, each time for twice as long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with none; `clock` returns monotonic seconds."""
        self._clock = clock
        self._nodes: dict[str, tuple[int, float]] = {}

    def add(self, node: str) -> None:
        """Notes that a node was left out."""
        times, _ = self._nodes.get(node, (0, 0.0))
        self._nodes[node] = times + 1, self._clock() + min(FIRST_S * 2**times, LONGEST_S)

    @property
    def names(self) -> frozenset[str]:
        """The nodes that get no processes now."""
        now_s = self._clock()
        # What is long past counts no more.
        self._nodes = {name: each for name, each in self._nodes.items() if now_s < each[1] + LONGEST_S}
        return frozenset(name for name, (_, until_s) in self._nodes.items() if now_s < until_s)
