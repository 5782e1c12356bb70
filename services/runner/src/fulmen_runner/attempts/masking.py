"""Masks an attempt's key and secrets in output of its agent.

Invariant: masked text contains a secret neither in plain form, nor percent-encoded, nor as in a JSON string, and does
not begin with a suffix of it, as text truncated at the front may. Of a secret of several lines, no line of at least
`_MIN_LINE` characters appears either. An agent can still reveal a secret in another encoding.
"""

import json
import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote, quote_plus

MASKED = "[masked]"

_UNRESERVED = re.compile(r"[A-Za-z0-9_.~-]*")
"""Characters that percent-encoding leaves unchanged (RFC 3986, section 2.3)."""

_MIN_SUFFIX = 8
"""Shortest suffix of a secret that is masked at the beginning of a text."""

_MAX_BEGINNINGS = 1000
"""Places of a secret that are compared with the beginning of a text; only one that repeats itself has more."""

_MIN_LINE = 16
"""Shortest line of a multi-line secret that is masked separately."""


def masked(text: str, secrets: Sequence[str]) -> str:
    """Returns the text without the secrets."""
    for secret in sorted(secrets, key=len, reverse=True) if text else ():
        for form in dict.fromkeys(_forms(secret)):
            text = text.replace(form, MASKED)
            text = _without_suffix(text, form)
    return text


def masked_message(text: str, secrets: Sequence[str]) -> str:
    """Masks the runner's first line and the agent's output after it separately: the output may begin inside a secret."""
    line, newline, written = text.partition("\n")
    return f"{masked(line, secrets)}{newline}{masked(written, secrets)}"


def masked_bytes(content: bytes, secrets: Sequence[str]) -> bytes:
    """Returns the content without the secrets; bytes that are not UTF-8 are kept."""
    text = content.decode(errors="surrogateescape")
    found = masked(text, secrets)
    return content if found == text else found.encode(errors="surrogateescape")


def _without_suffix(text: str, form: str) -> str:
    """Masks a suffix of a secret at the beginning of a text that was truncated inside it."""
    start = text[:_MIN_SUFFIX]
    begin = form.find(start, 1) if len(start) == _MIN_SUFFIX else -1
    for _ in range(_MAX_BEGINNINGS):
        if begin <= 0:
            break
        if text.startswith(form[begin:]):
            return MASKED + text[len(form) - begin :]
        begin = form.find(start, begin + 1)
    return text


def _forms(secret: str) -> Iterator[str]:
    """Returns the forms in which a secret may appear, the whole one first."""
    if not secret:
        return
    yield secret
    if _UNRESERVED.fullmatch(secret):
        return
    yield from (quote(secret), quote(secret, safe=""), quote_plus(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    lines = secret.splitlines()
    if len(lines) > 1:
        yield from (line for line in map(str.strip, lines) if len(line) >= _MIN_LINE)
