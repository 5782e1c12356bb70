"""How far code of tenants is kept away from the service that starts it.

Invariant: the operator of a service sets the lowest level; a tenant can only ask for a higher one.
"""

from enum import StrEnum


class Isolation(StrEnum):
    """Levels, from the lowest to the highest."""

    TRUSTED = "trusted"
    PROCESS = "process"
    SANDBOX = "sandbox"
    CONTAINER = "container"
    JOB = "job"

    @property
    def rank(self) -> int:
        """Position in the order of levels."""
        return _ORDER.index(self)

    def raised_to(self, floor: "Isolation") -> "Isolation":
        """Returns the higher one of this level and the operator's."""
        return max(self, floor, key=lambda level: level.rank)


_ORDER = tuple(Isolation)


class IsolationUnavailable(Exception):
    """The isolation is not available on this machine. The message names what is missing and what to do; it contains no
    secret."""
