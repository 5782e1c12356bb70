"""Messages between the service and the ranks of a trainer over a Unix socket: calls, answers, and their encoding.

A frame is its length in eight bytes and a msgpack message. Arguments and results are JSON in it, checked against the
types of `Trainer`'s methods; rows, which are most of the bytes, are msgpack. Nothing is unpickled, and torch is not
needed.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, BinaryIO, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, create_model

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.checkpoints import OtherArchitecture
from fulmen_algorithm.training.files import StorageFailed
from fulmen_algorithm.training.rows import Row
from fulmen_exchange.errors import ExchangeFailed

LENGTH_BYTES = 8
LONGEST_FRAME_BYTES = 2**34
OPEN = "open"
ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (RunFailed, OtherArchitecture, ValueError, StorageFailed, OSError)
}
"""Errors of a call by their name on the wire; any other error ends the rank."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a rank."""

    rank: int
    pid: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call, sent to every rank.

    Attributes:
        method: Name of a method of `Trainer`, or `open`.
        arguments: Arguments other than rows, as JSON.
        rows: Rows, if the method takes any.
    """

    method: str
    arguments: bytes
    rows: list[Row] = []


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one rank.

    Attributes:
        result: Result as JSON; empty after an error, and from ranks other than the first.
        error: A key of `ERRORS`, another name if the error ends the rank, or empty.
        text: Text of the error, if it is one of `ERRORS`; others stay in the rank's log.
    """

    result: bytes = b""
    error: str = ""
    text: str = ""


def takes_rows(method: str) -> bool:
    """Returns whether a method of `Trainer` takes rows."""
    return "rows" in _hints(method)


def encode_call(method: str, rows: Sequence[Row], arguments: Mapping[str, object]) -> bytes:
    """Encodes a call as a frame."""
    call = Call(method=method, arguments=_dumped(_arguments(method), arguments), rows=list(rows))
    return frame(msgspec.msgpack.encode(call))


def decode_arguments(call: Call) -> dict[str, Any]:
    """Reads the arguments of a call."""
    model = _arguments(call.method)
    return dict(model.model_validate_json(call.arguments))


def encode_result(method: str, value: object) -> bytes:
    """Encodes a result as JSON."""
    return _dumped(_result(method), {"value": value})


def decode_result(method: str, result: bytes) -> Any:
    """Reads a result."""
    return dict(_result(method).model_validate_json(result))["value"]


def frame(message: bytes) -> bytes:
    """Prefixes a message with its length."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def frame_length(head: bytes) -> int:
    """Reads the length of a message.

    Raises:
        ValueError: if it exceeds the maximum length.
    """
    length = int.from_bytes(head, "big")
    if length > LONGEST_FRAME_BYTES:
        raise ValueError(f"A frame of {length} bytes is none of ours.")
    return length


def read_frame(stream: BinaryIO) -> bytes | None:
    """Reads a message; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = frame_length(head)
    message = stream.read(length)
    return message if len(message) == length else None


def known_error(error: Exception) -> str:
    """Returns an error's name on the wire; its class name if callers must not see it."""
    return next((name for name, known in ERRORS.items() if isinstance(error, known)), type(error).__name__)


def public_message(error: Exception) -> str:
    """Returns the part of an error's text that may be shown to users."""
    return str(error) if isinstance(error, (*ERRORS.values(), ExchangeFailed)) else ""


@cache
def _hints(method: str) -> dict[str, Any]:
    if method == OPEN:
        return {"setup": TrainerSetup, "return": type(None)}
    return get_type_hints(getattr(Trainer, method))


@cache
def _arguments(method: str) -> type[BaseModel]:
    return _model(f"{method}_arguments", {n: h for n, h in _hints(method).items() if n not in ("rows", "return")})


@cache
def _result(method: str) -> type[BaseModel]:
    return _model(f"{method}_result", {"value": _hints(method)["return"]})


def _model(name: str, hints: Mapping[str, Any]) -> type[BaseModel]:
    # A loss may be infinite or NaN and must arrive unchanged.
    config = ConfigDict(ser_json_inf_nan="constants", arbitrary_types_allowed=True)
    fields: dict[str, Any] = {key: (hint, ...) for key, hint in hints.items()}
    return create_model(name, __config__=config, **fields)


def _dumped(model: type[BaseModel], values: Mapping[str, object]) -> bytes:
    return model.model_construct(None, **values).model_dump_json().encode()
