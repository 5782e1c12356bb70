"""Replaces what rules find in the texts of a call.

Invariant: a call is redacted completely or not at all, in bounded time: a search gives up at its deadline. Searches run
outside the event loop, and without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from fulmen_llm_proxy.routing.table import Recording

if TYPE_CHECKING:
    import regex

LIMIT_S: Final = 1.0
"""Time for all texts of a call, seconds."""

_BUILT_IN: Final[dict[str, str]] = {
    "email": r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}\p{L}{2,63}",
    # International, or in groups: a plain number is more often something else.
    "phone": r"(?<![\w+])(?:\+\d{1,3}[ .()/-]{0,2}(?:\d[ .()/-]{0,2}){5,13}\d"
    r"|\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}|0\d{1,4}[ /-](?:\d[ /-]?){4,10}\d)(?!\w)",
    "card_number": r"(?<![\w-])(?:\d[ -]?){12,18}\d(?![\w-])",
    "api_key": r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----.{0,8192}?-----END [A-Z ]{0,32}PRIVATE KEY-----"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|\b(?:sk|pk|rk)[-_][\w-]{16,}|\bAKIA[0-9A-Z]{16}\b|\b(?:gh[pousr]|github_pat)_\w{20,}"
    r"|\bglpat-[\w-]{20,}|\bhf_\w{20,}|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|(?i:\bbearer\s{1,4})[\w.~+/-]{16,}=*",
}


class Redactor:
    """Replaces what the rules of a route find."""

    def __init__(self, recording: Recording) -> None:
        """Compiles the rules.

        Raises:
            regex.error: if one is not a regular expression.
        """
        self._rules = _compiled(recording) if recording.patterns or recording.redact else []

    def redact(self, value: Any) -> Any:
        """Returns a JSON value whose texts, and names of fields, are redacted.

        Raises:
            TimeoutError: if it takes too long.
            RecursionError: if it is nested too deeply.
        """
        return self._value(value, time.monotonic() + LIMIT_S) if self._rules else value

    def _value(self, value: Any, until: float) -> Any:
        match value:
            case str():
                return self._text(value, until)
            case list():
                return [self._value(each, until) for each in value]
            case dict():
                return {self._text(name, until): self._field(name, each, until) for name, each in value.items()}
            case _:
                return value

    def _field(self, name: str, value: Any, until: float) -> Any:
        """Redacts a field; the arguments of a tool call as the JSON that they are, whose escapes would hide texts."""
        if name == "arguments" and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return json.dumps(self._value(json.loads(value), until), ensure_ascii=False)
        return self._value(value, until)

    def _text(self, text: str, until: float) -> str:
        for pattern, replace in self._rules:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            text = pattern.sub(replace, text, concurrent=True, timeout=left_s)
        return text


def _compiled(recording: Recording) -> list[tuple[regex.Pattern[str], str | Callable[[regex.Match[str]], str]]]:
    """Returns the rules in the order in which they are applied, each with what replaces its matches."""
    # 1.3 MB per process, and most routes have no rules.
    import regex

    rules: list[tuple[regex.Pattern[str], str | Callable[[regex.Match[str]], str]]] = [
        (regex.compile(expression), f"[{name}]") for name, expression in recording.patterns
    ]
    # Keys first: parts of them may look like numbers.
    return rules + [
        (
            regex.compile(_BUILT_IN[name], regex.VERSION0 | regex.DOTALL),
            _card if name == "card_number" else f"[{name}]",
        )
        for name in reversed(_BUILT_IN)
        if name in recording.redact
    ]


def _card(match: regex.Match[str]) -> str:
    """Replaces digits with the check digit of a card (Luhn, ISO/IEC 7812-1), and leaves other numbers."""
    digits = [int(each) for each in match[0] if each.isdigit()][::-1]
    doubled = sum(sum(divmod(2 * each, 10)) for each in digits[1::2])
    return match[0] if (sum(digits[::2]) + doubled) % 10 else "[card_number]"


@lru_cache(maxsize=256)
def redactor_of(recording: Recording) -> Redactor:
    """Returns the redactor of a route's rules."""
    return Redactor(recording)
