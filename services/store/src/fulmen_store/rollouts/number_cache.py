"""Numbers of names, remembered for an hour.

A name is marked as used when its number is read. Names that were not used for a day may be removed (retention/), so no number
is remembered for as long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

__all__ = ["NumberCache"]

NAMES: Final = 10_000
TTL_S: Final = 3600.0


class NumberCache:
    """Remembers at most 10,000 numbers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def get(self, key: Hashable) -> int | None:
        """Returns the number of a name; None if it is not known, or was read too long ago."""
        number, until = self._known.get(key, (None, 0.0))
        return number if self._clock() < until else None

    def put(self, key: Hashable, number: int) -> None:
        """Remembers a number that was just read."""
        self._known[key] = number, self._clock() + TTL_S
        self._known.move_to_end(key)
        if len(self._known) > NAMES:
            self._known.popitem(last=False)
