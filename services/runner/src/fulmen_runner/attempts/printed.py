"""The end of what an agent printed, kept with its attempt.

Invariant: what is reported has at most `limit_bytes` of each stream, and none of the attempt's secrets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulmen_runner.attempts.masking import masked
from fulmen_runner.attempts.outcome import Printed, cut_at_front

MAX_PRINTED_BYTES = 32 * 1024
"""Largest end of a stream that the contract allows."""


@dataclass(slots=True, kw_only=True)
class PrintedTails:
    """Where hosts of agents leave the ends of the two streams.

    Attributes:
        limit_bytes: How much of each stream is kept; 0 for nothing.
    """

    limit_bytes: int = 0
    stdout: bytes = field(default=b"", repr=False)
    stderr: bytes = field(default=b"", repr=False)

    def keep(self, stdout: bytes, stderr: bytes) -> None:
        """Keeps the ends of the streams; later ones replace them."""
        if self.limit_bytes:
            self.stdout, self.stderr = stdout[-self.limit_bytes :], stderr[-self.limit_bytes :]

    def reported(self, secrets: Sequence[str]) -> Printed:
        """Returns what is reported, without secrets."""
        return Printed(stdout=self._text(self.stdout, secrets), stderr=self._text(self.stderr, secrets))

    def _text(self, stream: bytes, secrets: Sequence[str]) -> str:
        return cut_at_front(masked(stream.decode(errors="replace"), secrets), self.limit_bytes) if stream else ""
