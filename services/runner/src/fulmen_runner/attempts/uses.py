"""Reference counts of files on disk."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Uses:
    """A reference count that starts at one, for its creator. Not thread-safe: use it on the event loop.

    Attributes:
        release: Called once, when the count drops to zero.
    """

    release: Callable[[], None]
    _count: int = 1

    def begin(self) -> bool:
        """Adds a use; returns False if the resource is already released."""
        if not self._count:
            return False
        self._count += 1
        return True

    def end(self) -> None:
        """Ends a use."""
        self._count -= 1
        if not self._count:
            self.release()
