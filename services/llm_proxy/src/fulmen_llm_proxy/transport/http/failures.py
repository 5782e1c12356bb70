"""Errors as the OpenAI API words them, with the one who failed: the backend or the proxy."""

from __future__ import annotations

import msgspec

from fulmen.errors import BackendUnavailable, Code, FulmenError
from fulmen_llm_proxy.domain.sse import encode_event
from fulmen_service_kit.http_wire import Header, Receive, Send, respond

SOURCE_HEADER = b"x-fulmen-error-source"
RETRY_AFTER_S = 1
"""What a refusal for want of room tells the caller to wait."""

_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.RESOURCE_EXHAUSTED: 413,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_BACKEND_FAILED = 502


class Refused(Exception):
    """A refusal that only HTTP knows: a path, a method, a limit."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def status_of(error: FulmenError | Refused) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, Refused):
        return error.status
    return _BACKEND_FAILED if isinstance(error, BackendUnavailable) else _STATUS[error.code]


def is_infrastructure(status: int) -> bool:
    """Tells whether a call that ended with this status failed for a reason that is not the agent's."""
    return status >= 500 or status == 429


def error_document(error: FulmenError | Refused) -> bytes:
    """Returns the error as the JSON document that OpenAI clients understand."""
    status = status_of(error)
    fault = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    if status == 429:
        fault = "rate_limit_error"
    code = error.code if isinstance(error, Refused) else error.reason.lower()
    body = {
        "message": str(error),
        "type": fault,
        "param": None,
        "code": code,
        "source": _source(error).decode(),
    }
    return msgspec.json.encode({"error": body})


async def respond_error(send: Send, error: FulmenError | Refused, unread: Receive | None = None) -> None:
    """Answers a call with an error, before any byte of an answer; `unread` gives what is left of the request."""
    status = status_of(error)
    extra: list[Header] = [(SOURCE_HEADER, _source(error))]
    if status in (429, 503):
        extra.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    if status in (408, 413):
        # The rest of the body is not read: the connection cannot be used again.
        extra.append((b"connection", b"close"))
    await respond(send, status, error_document(error), extra=extra, unread=unread)


def error_event(error: FulmenError) -> bytes:
    """Returns the event that tells the caller of a stream that the answer breaks off here."""
    return encode_event(error_document(error))


def _source(error: FulmenError | Refused) -> bytes:
    return b"backend" if isinstance(error, BackendUnavailable) else b"proxy"
