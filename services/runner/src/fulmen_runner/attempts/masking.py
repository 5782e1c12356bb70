"""Takes an attempt's key out of what its agent wrote.

Invariant: what is masked holds the key neither as it is nor percent-encoded, whole or, where text was cut at the front,
its end. An agent that wants its key to be seen can still write it in another way: it is the attempt's own, and ends
with the attempt.
"""

import re
from urllib.parse import quote, quote_plus

MASKED = "[masked]"

_UNRESERVED = re.compile(r"[A-Za-z0-9_.~-]*")
"""Texts that percent-encoding leaves as they are (RFC 3986, section 2.3)."""

_LEAST_END = 8
"""Fewer characters than this at the front of a text are not taken for the end of the key."""


def masked(text: str, key: str) -> str:
    """Returns the text without the key."""
    if not key or not text:
        return text
    for form in _forms(key):
        text = text.replace(form, MASKED)
        text = _without_end(text, form)
    return text


def masked_message(text: str, key: str) -> str:
    """Returns a message without the key: a line of the runner's, then the end of what the agent wrote, cut at its front."""
    line, newline, written = text.partition("\n")
    return f"{masked(line, key)}{newline}{masked(written, key)}"


def masked_bytes(content: bytes, key: str) -> bytes:
    """Returns content without the key; what is no UTF-8 is kept."""
    text = content.decode(errors="surrogateescape")
    found = masked(text, key)
    return content if found is text or found == text else found.encode(errors="surrogateescape")


def _without_end(text: str, form: str) -> str:
    """Masks the end of a key with which a text begins, because it was cut there."""
    start = text[:_LEAST_END]
    begin = form.find(start, 1) if len(start) == _LEAST_END else -1
    while begin > 0:
        if text.startswith(form[begin:]):
            return MASKED + text[len(form) - begin :]
        begin = form.find(start, begin + 1)
    return text


def _forms(key: str) -> tuple[str, ...]:
    if _UNRESERVED.fullmatch(key):
        return (key,)
    return tuple(dict.fromkeys((key, quote(key), quote(key, safe=""), quote_plus(key))))
