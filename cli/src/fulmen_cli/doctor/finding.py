"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check.

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
