"""Messages between the service and the ranks of a trainer: calls, answers, and their encoding.

A frame is its length in eight bytes and a msgpack message. Arguments and results are JSON in it, checked against the
types of `Trainer`'s methods; rows, which are most of the bytes, are msgpack. Nothing is unpickled, and torch is not
needed.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, create_model

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.standings import HandOver, Standing
from fulmen_algorithm.training.files import OtherArchitecture, StorageFailed
from fulmen_algorithm.training.rows import Row
from fulmen_exchange.errors import ExchangeFailed

LENGTH_BYTES = 8
LONGEST_FRAME_BYTES = 2**34
OPEN = "open"
LEAVE = "leave"
HAND_OVER = "hand_over"
RANKS_LOST = "RanksLost"
"""Error of a call that a rank has left, because others are lost: it then waits for an order."""
ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (RunFailed, OtherArchitecture, ValueError, StorageFailed, OSError)
}
"""Errors of a call by their name on the wire; any other error ends the rank."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a rank.

    Attributes:
        rank: The rank.
        pid: Process id.
        meeting: URL at which it waits for the other ranks; empty if they meet elsewhere.
        build: What results depend on besides the run; see `build`.
        asks_files: Whether this is a line for files beside the line of calls; see `trainers.files`.
    """

    rank: int
    pid: int
    meeting: str = ""
    build: dict[str, str] = {}
    asks_files: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the hello, when all ranks are connected.

    Attributes:
        rendezvous: URL at which the ranks meet.
    """

    rendezvous: str


def build() -> dict[str, str]:
    """Returns what must be equal on all ranks: versions, and a digest of which settings a trainer has."""
    # Without the part that names a build for some accelerator.
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "peft")}
    schemas = [_undescribed(_arguments(method).model_json_schema()) for method in (OPEN, "train", "train_supervised")]
    settings = hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:16]
    return {"python": platform.python_version(), **versions, "settings": settings}


def differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> list[str]:
    """Returns in what a build differs from the service's, as sentences without a subject."""
    return [
        f"has {name} {theirs.get(name, '(none)')}, the service {mine[name]}"
        for name in mine
        if theirs.get(name) != mine[name]
    ]


def _undescribed(schema: Any) -> Any:
    """Returns a schema without the texts for people."""
    if isinstance(schema, dict):
        return {
            key: _undescribed(value)
            for key, value in schema.items()
            if not (key in ("description", "title") and isinstance(value, str))
        }
    return [_undescribed(each) for each in schema] if isinstance(schema, list) else schema


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
    """Prefixes a message with its length; see `cluster.wire.read_message`."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


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
    if method == LEAVE:
        return {"return": Standing}
    if method == HAND_OVER:
        return {"order": HandOver, "return": type(None)}
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
