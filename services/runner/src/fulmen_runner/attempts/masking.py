"""Masks an attempt's key in output of its agent.

Invariant: masked text contains the key neither in plain form nor percent-encoded, and does not begin with a suffix of
it, as text truncated at the front may. An agent can still reveal its key in another encoding; the key is valid for its
own attempt only and expires with it.
"""

import re
from urllib.parse import quote, quote_plus

MASKED = "[masked]"

_UNRESERVED = re.compile(r"[A-Za-z0-9_.~-]*")
"""Characters that percent-encoding leaves unchanged (RFC 3986, section 2.3)."""

_MIN_SUFFIX = 8
"""Shortest suffix of the key that is masked at the beginning of a text."""


def masked(text: str, key: str) -> str:
    """Returns the text without the key."""
    if not key or not text:
        return text
    for form in _forms(key):
        text = text.replace(form, MASKED)
        text = _without_suffix(text, form)
    return text


def masked_message(text: str, key: str) -> str:
    """Masks the runner's first line and the agent's output after it separately: the output may begin inside the key."""
    line, newline, written = text.partition("\n")
    return f"{masked(line, key)}{newline}{masked(written, key)}"


def masked_bytes(content: bytes, key: str) -> bytes:
    """Returns the content without the key; bytes that are not UTF-8 are kept."""
    text = content.decode(errors="surrogateescape")
    found = masked(text, key)
    return content if found is text or found == text else found.encode(errors="surrogateescape")


def _without_suffix(text: str, form: str) -> str:
    """Masks a suffix of the key at the beginning of a text that was truncated inside it."""
    start = text[:_MIN_SUFFIX]
    begin = form.find(start, 1) if len(start) == _MIN_SUFFIX else -1
    while begin > 0:
        if text.startswith(form[begin:]):
            return MASKED + text[len(form) - begin :]
        begin = form.find(start, begin + 1)
    return text


def _forms(key: str) -> tuple[str, ...]:
    if _UNRESERVED.fullmatch(key):
        return (key,)
    return tuple(dict.fromkeys((key, quote(key), quote(key, safe=""), quote_plus(key))))
