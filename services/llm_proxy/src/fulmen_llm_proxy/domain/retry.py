"""How long a call waits before it is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Back-off that grows by two up to a cap, with jitter, within a total deadline.

    Attributes:
        deadline_s: seconds after the first try in which a further try may begin; 0 never retries.
        first_delay_s: mean of the first wait, in seconds.
        max_delay_s: cap of the mean wait, in seconds.
    """

    deadline_s: float
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0

    def delays(self, random: Callable[[], float]) -> Iterator[float]:
        """Yields the waits in seconds, without end; each is its mean times 0.5 to 1.5.

        The jitter keeps the agents that lost the same backend from coming back all at once.
        """
        mean = self.first_delay_s
        while True:
            yield mean * (0.5 + random())
            mean = min(self.max_delay_s, mean * 2)
