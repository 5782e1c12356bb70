"""Maps errors to HTTP statuses and headers, and to their source: the backend or the proxy."""

from __future__ import annotations

import math

from fulmen.errors import BackendUnavailable, Code, FulmenError, ModelLimitExceeded, QuotaExceeded
from fulmen_llm_proxy.apis.errors import CallError
from fulmen_llm_proxy.calls.answer_writer import Header

SOURCE_HEADER = b"x-fulmen-error-source"
RETRY_AFTER_S = 1
"""Default `Retry-After` of a refusal for lack of capacity, seconds."""

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
"""Statuses of requests whose body is not read to its end, so that their connection cannot be reused."""
_BACKEND_FAILED = 502
_TOO_MANY = 429
_NOT_SERVED = 501


class Refused(Exception):
    """A refusal that exists in HTTP only: an unknown path, a method, a limit.

    Attributes:
        retry_after_s: seconds after which the same call may be admitted; None if unknown.
        param: field of the request that is at fault; empty if none is.
    """

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: float | None = None, param: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param


def status_of(error: FulmenError | Refused) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, ModelLimitExceeded | QuotaExceeded):
        return _TOO_MANY
    return _BACKEND_FAILED if isinstance(error, BackendUnavailable) else _STATUS[error.code]


def code_of(error: FulmenError | Refused) -> str:
    """Returns the machine-readable code of an error."""
    return error.code if isinstance(error, Refused) else error.reason.lower()


def is_infrastructure(status: int) -> bool:
    """Returns whether a call with this status failed for a reason other than the agent's request.

    501 (an API that the backend does not serve) does not count: a retry would fail in the same way.
    """
    return (status >= 500 and status != _NOT_SERVED) or status == 429


def is_throttled(status: int) -> bool:
    """Returns whether the status means lack of capacity, so that fewer concurrent calls would help."""
    return status in (429, 503)


def call_error(error: FulmenError | Refused) -> CallError:
    """Returns the error in the form that dialects render."""
    source = "backend" if isinstance(error, BackendUnavailable) else "proxy"
    vendor_code = error.metadata.get("vendor_code", "") if isinstance(error, FulmenError) else ""
    return CallError(
        status=status_of(error),
        code=code_of(error),
        message=str(error),
        source=source,
        vendor_code=vendor_code,
        param=error.param if isinstance(error, Refused) else "",
    )


def headers_of(error: FulmenError | Refused) -> list[Header]:
    """Returns the headers of an error: its source, when to retry, whether the connection closes."""
    reported = call_error(error)
    extra: list[Header] = [(SOURCE_HEADER, reported.source.encode())]
    if reported.status in (429, 503):
        extra.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or RETRY_AFTER_S))))
    if reported.status == _NOT_SERVED:
        extra.append((b"x-should-retry", b"false"))  # vendors' clients retry every 5xx otherwise
    if reported.status in BODY_UNREAD:
        extra.append((b"connection", b"close"))
    return extra
