"""Errors in the format of each dialect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, Dialect, encode
from fulmen_llm_proxy.apis.sse import encode_event

CALLER_GONE = "caller_gone"
"""The `error_type` of a call whose caller disconnected before the end of its answer."""

GUARD_REFUSED = "guard_refused"
GUARD_UNAVAILABLE = "guard_unavailable"
UNSEEN = frozenset({CALLER_GONE, GUARD_REFUSED, GUARD_UNAVAILABLE})
"""`error_type` of calls whose answer, if there was one, the caller has not seen."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """An error, independent of dialect.

    Attributes:
        code: machine-readable code, such as `route_not_found`.
        source: "backend" or "proxy", whichever failed.
        vendor_code: code that the vendor's own client handles; empty without one.
        param: field of the request that is at fault; empty if none is.
    """

    status: int
    code: str
    message: str
    source: str = "proxy"
    vendor_code: str = ""
    param: str = ""


def error_document(error: CallError, dialect: Dialect) -> bytes:
    """Returns the error as a JSON document for the vendor's clients."""
    if dialect is Dialect.ANTHROPIC:
        fault = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        inner: dict[str, object] = {
            "type": fault,
            "message": error.message,
            "code": error.code,
            "source": error.source,
        }
        if error.vendor_code:
            inner["details"] = {"error_code": error.vendor_code}
        return encode({"type": "error", "error": inner})
    fault = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        fault = "rate_limit_error"
    document: dict[str, str | None] = {
        "message": error.message,
        "type": fault,
        "param": error.param or None,
        "code": error.code,
        "source": error.source,
    }
    return encode({"error": document})


def error_event(error: CallError, api: ApiName, dialect: Dialect, *, sequence: int = 0) -> bytes:
    """Returns the event that ends a stream with an error.

    Args:
        sequence: number of the event, in an API that numbers events.
    """
    if dialect is Dialect.ANTHROPIC:
        return encode_event(error_document(error, dialect), b"error")
    if api is ApiName.RESPONSES:
        document: dict[str, str | int | None] = {"type": "error", "sequence_number": sequence, "code": error.code}
        document |= {"message": error.message, "param": None}
        return encode_event(encode(document), b"error")
    return encode_event(error_document(error, dialect))


class _Inner(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None
    type: str | None = None


class _Refusal(msgspec.Struct):
    error: _Inner | str | None = None
    message: str | None = None  # top-level message of some engines
    detail: Any = None  # FastAPI: a text, or a list of violations


_REFUSAL = msgspec.json.Decoder(_Refusal)


def refusal_of(status: int, body: bytes) -> CallError:
    """Parses a backend's error in any dialect, for conversion to another."""
    try:
        read = _REFUSAL.decode(body)
    except UNREADABLE:
        read = _Refusal()
    inner = _Inner(message=read.error) if isinstance(read.error, str) else read.error or _Inner()
    detail = read.detail if isinstance(read.detail, str) else None
    message = inner.message or read.message or detail or f"The backend answered {status}."
    code = inner.code or inner.type or f"backend_{status}"
    return CallError(status=status, code=str(code), message=message, source="backend")


_STATUS_OF_TYPE = {fault: status for status, fault in _ANTHROPIC_TYPES.items()} | {"billing_error": 402}


def error_in_stream(body: bytes) -> CallError:
    """Parses an error within a stream, which has no HTTP status."""
    reported = refusal_of(500, body)
    if reported.code.isdigit():
        code = int(reported.code)
        return replace(reported, status=code if 400 <= code < 600 else 500)
    return replace(reported, status=_STATUS_OF_TYPE.get(reported.code, 500))
