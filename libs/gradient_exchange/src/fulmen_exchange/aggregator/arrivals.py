"""When the others need not be waited for any more.

Source: median absolute deviation as a robust scale (Rousseeuw and Croux, 1993); a deadline at the median and four of them
lets a normal spread pass, and one straggler does not move it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 32
DEVIATIONS = 4.0


@dataclass(slots=True, kw_only=True)
class ArrivalTimes:
    """How long after the first chunk of a sum payloads were complete; of the last 32.

    Attributes:
        min_s: The shortest deadline.
        max_s: The longest, and that before anything is known.
    """

    min_s: float
    max_s: float
    _offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, offset_s: float) -> None:
        """Remembers one; of a payload that was not waited for, how long it was."""
        self._offsets_s.append(offset_s)

    def deadline_s(self) -> float:
        """Returns how long after the first chunk a sum waits: median + 4 MAD, within the limits."""
        if not self._offsets_s:
            return self.max_s
        middle = median(self._offsets_s)
        spread = median(abs(offset - middle) for offset in self._offsets_s)
        return min(self.max_s, max(self.min_s, middle + DEVIATIONS * spread))
