"""Counts who uses something that takes up room, and lets it go with the last one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Uses:
    """The uses of one thing; it begins with that of whoever makes it. For the event loop only.

    Attributes:
        let_go: Called once, at the end of the last use.
    """

    let_go: Callable[[], None]
    _count: int = 1

    def begin(self) -> bool:
        """Begins another use; tells whether the thing is still there."""
        if not self._count:
            return False
        self._count += 1
        return True

    def end(self) -> None:
        """Ends a use."""
        self._count -= 1
        if not self._count:
            self.let_go()
