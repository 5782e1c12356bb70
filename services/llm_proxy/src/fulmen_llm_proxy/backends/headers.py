"""The HTTP headers that pass through the proxy: an allowlist in each direction.

A caller's authorization, cookies, `x-forwarded-*` and `host` never reach a backend; a backend's cookies and internal
headers never reach a caller. Only values of printable ASCII pass, so no value can start another header.
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
"""Request headers that pass. `openai-organization` and the like do not: they belong to the caller's own account."""

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
"""Prefixes of rate-limit headers."""


def to_backend(headers: Iterable[Header]) -> dict[str, str]:
    """Returns the caller's headers that may reach a backend, the first of each name; names must be in lower case."""
    passed: dict[str, str] = {}
    for name, value in headers:
        known = TO_BACKENDS.get(name)
        if known is not None and known not in passed and _is_clean(value):
            passed[known] = value.decode("ascii")
    return passed


def of_dialect(headers: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Returns the headers without other dialects' headers."""
    return {name: value for name, value in headers.items() if _OF_DIALECT.get(name, dialect) is dialect}


def to_caller(headers: Iterable[Header]) -> list[Header]:
    """Returns the backend's headers that may reach a caller."""
    passed = []
    for name, value in headers:
        lowered = name.lower()
        if (lowered in TO_CALLERS or lowered.startswith(LIMITS_TO_CALLERS)) and _is_clean(value) and _is_clean(name):
            passed.append((lowered, value))
    return passed


def _is_clean(text: bytes) -> bool:
    return len(text) <= MAX_VALUE_BYTES and text.isascii() and text.decode("ascii").isprintable()
