"""Errors as HTTP statuses, with the one who failed: the backend or the proxy."""

from __future__ import annotations

import math

from fulmen.errors import BackendUnavailable, Code, FulmenError, ModelLimitExceeded
from fulmen_llm_proxy.apis.errors import CallError
from fulmen_llm_proxy.calls.sink import Header

SOURCE_HEADER = b"x-fulmen-error-source"
RETRY_AFTER_S = 1
"""What a refusal for want of room tells the caller to wait, unless it knows better."""

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
BODY_UNREAD = frozenset({408, 413})
"""Statuses of requests whose body is not read to its end: their connection cannot be used again."""
_BACKEND_FAILED = 502
_TOO_MANY = 429
_NOT_SERVED = 501


class Refused(Exception):
    """A refusal that only HTTP knows: a path, a method, a limit.

    Attributes:
        retry_after_s: seconds after which the same call may be let in; None: not told.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def status_of(error: FulmenError | Refused) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, ModelLimitExceeded):
        return _TOO_MANY
    return _BACKEND_FAILED if isinstance(error, BackendUnavailable) else _STATUS[error.code]


def code_of(error: FulmenError | Refused) -> str:
    """Returns what a program reads of an error."""
    return error.code if isinstance(error, Refused) else error.reason.lower()


def is_infrastructure(status: int) -> bool:
    """Tells whether a call that ended with this status failed for a reason that is not the agent's.

    An API that the backend does not have (501) is no passing fault: another try would end the same.
    """
    return (status >= 500 and status != _NOT_SERVED) or status == 429


def is_throttled(status: int) -> bool:
    """Tells whether a call that ended with this status found no room, so that fewer at once would do better."""
    return status in (429, 503)


def call_error(error: FulmenError | Refused) -> CallError:
    """Returns the error, ready to be worded in a dialect."""
    source = "backend" if isinstance(error, BackendUnavailable) else "proxy"
    vendor_code = error.metadata.get("vendor_code", "") if isinstance(error, FulmenError) else ""
    return CallError(
        status=status_of(error), code=code_of(error), message=str(error), source=source, vendor_code=vendor_code
    )


def headers_of(error: FulmenError | Refused) -> list[Header]:
    """Returns the headers that go with an error: who failed, when to come back, whether the connection ends."""
    told = call_error(error)
    extra: list[Header] = [(SOURCE_HEADER, told.source.encode())]
    if told.status in (429, 503):
        extra.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or RETRY_AFTER_S))))
    if told.status == _NOT_SERVED:
        extra.append((b"x-should-retry", b"false"))  # the vendors' clients send a 5xx again unless told not to
    if told.status in BODY_UNREAD:
        extra.append((b"connection", b"close"))
    return extra
