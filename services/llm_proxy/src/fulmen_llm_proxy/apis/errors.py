"""Errors as each dialect words them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, Dialect, encode
from fulmen_llm_proxy.apis.sse import encode_event

CALLER_GONE = "caller_gone"
"""The `error_type` of a call whose caller went away before it had its answer."""

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
    """An error before it is worded.

    Attributes:
        code: what a program reads, such as `route_not_found`.
        source: "backend" or "proxy": who failed.
        vendor_code: what the vendor's own client reads to help itself; empty if there is nothing like it.
    """

    status: int
    code: str
    message: str
    source: str = "proxy"
    vendor_code: str = ""


def error_document(error: CallError, dialect: Dialect) -> bytes:
    """Returns the error as the JSON document that the vendor's clients understand."""
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
        "param": None,
        "code": error.code,
        "source": error.source,
    }
    return encode({"error": document})


def error_event(error: CallError, api: ApiName, dialect: Dialect, *, sequence: int = 0) -> bytes:
    """Returns the event that tells the caller of a stream that the answer breaks off here.

    Args:
        sequence: its number, in an API that numbers its events.
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
    message: str | None = None  # of some engines: at the top
    detail: Any = None  # of FastAPI: a text, or a list of what is wrong where


_REFUSAL = msgspec.json.Decoder(_Refusal)


def refusal_of(status: int, body: bytes) -> CallError:
    """Reads a backend's refusal in whatever dialect, so that it can be worded in another."""
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
    """Reads an error that a backend reported within its stream, where no status told its kind."""
    told = refusal_of(500, body)
    if told.code.isdigit():
        code = int(told.code)
        return replace(told, status=code if 400 <= code < 600 else 500)
    return replace(told, status=_STATUS_OF_TYPE.get(told.code, 500))
