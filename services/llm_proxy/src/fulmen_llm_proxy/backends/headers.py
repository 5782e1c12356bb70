"""Which HTTP headers pass through the proxy. Both ways these are lists of what may pass: whatever is not named stays here.

A caller's authorization, cookies, `x-forwarded-*` and `host` never reach a backend; a backend's cookies and what tells
of its insides never reach a caller. A value passes only if it is printable ASCII: no value can begin another header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fulmen_llm_proxy.apis.api import Dialect

Header = tuple[bytes, bytes]

MAX_VALUE_BYTES: Final = 1024

TO_BACKENDS: Final[Mapping[bytes, str]] = {
    name.encode(): name
    for name in (
        "traceparent",
        "tracestate",
        "idempotency-key",
        "x-client-request-id",
        "openai-beta",
        "anthropic-beta",
        "anthropic-version",
    )
}
"""What a caller may tell a backend. Not `openai-organization` and the like: those go with the caller's own account."""

_OF_DIALECT: Final = {
    "openai-beta": Dialect.OPENAI,
    "anthropic-beta": Dialect.ANTHROPIC,
    "anthropic-version": Dialect.ANTHROPIC,
}

TO_CALLERS: Final = frozenset(
    {
        b"retry-after",
        b"retry-after-ms",
        b"x-should-retry",
        b"x-request-id",
        b"request-id",
        b"apim-request-id",
        b"openai-processing-ms",
        b"openai-version",
    }
)
LIMITS_TO_CALLERS: Final = (b"x-ratelimit-", b"anthropic-ratelimit-")
"""How much a backend will still take; the names end in what is limited."""


def to_backend(headers: Iterable[Header]) -> dict[str, str]:
    """Returns what a backend may see of a caller's headers, whose names are in lower case; the first of each name."""
    passed: dict[str, str] = {}
    for name, value in headers:
        known = TO_BACKENDS.get(name)
        if known is not None and known not in passed and _is_clean(value):
            passed[known] = value.decode("ascii")
    return passed


def of_dialect(headers: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Leaves out the headers that only servers of another dialect understand."""
    return {name: value for name, value in headers.items() if _OF_DIALECT.get(name, dialect) is dialect}


def to_caller(headers: Iterable[Header]) -> list[Header]:
    """Returns what a caller may see of a backend's headers."""
    passed = []
    for name, value in headers:
        lowered = name.lower()
        if (lowered in TO_CALLERS or lowered.startswith(LIMITS_TO_CALLERS)) and _is_clean(value) and _is_clean(name):
            passed.append((lowered, value))
    return passed


def _is_clean(text: bytes) -> bool:
    return len(text) <= MAX_VALUE_BYTES and text.isascii() and text.decode("ascii").isprintable()
