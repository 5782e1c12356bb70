"""What `fulmen doctor` finds, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        ok: None where it is only worth knowing.
        text: What was found.
        advice: What to do; empty if nothing need be done.
    """

    what: str
    ok: bool | None
    text: str
    advice: str = ""
