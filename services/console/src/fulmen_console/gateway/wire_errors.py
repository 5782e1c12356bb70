"""Errors of services in the Connect protocol, with the same code, message and details."""

from __future__ import annotations

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from protobuf.wkt import Any

from fulmen.errors import FulmenError
from fulmen.rpc.status import encode

__all__ = ["connect_error"]

_RENAMED = {"CANCELLED": "CANCELED"}


def connect_error(error: FulmenError) -> ConnectError:
    """Returns an error in Connect's format, with the details of gRPC: `ErrorInfo`, `BadRequest`, `RetryInfo`."""
    name = error.code.value
    details = [Any(type_url=detail.type_url, value=detail.value) for detail in encode(error).details]
    return ConnectError(Code[_RENAMED.get(name, name)], error.message, details)
