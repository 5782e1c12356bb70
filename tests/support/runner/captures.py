"""The proxy's side of an executor: which captures it confirms."""

from __future__ import annotations

from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.errors import CapturesUnavailable


class Captures:
    """Captures of a proxy that may be away, or confirm nothing."""

    def __init__(self, *, reachable: bool = True, confirms: bool = True) -> None:
        self._reachable, self._confirms = reachable, confirms

    async def reach(self) -> None:
        if not self._reachable:
            raise CapturesUnavailable("The model proxy cannot be reached.")

    async def flush(self, attempt: str) -> CaptureEvidence:
        if not self._confirms:
            raise CapturesUnavailable("not confirmed")
        return CaptureEvidence()


async def all_acknowledged(_: str) -> int:
    return 0
