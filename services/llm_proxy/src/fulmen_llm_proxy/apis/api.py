"""The interface of an API.

An API is one kind of call with its own JSON: chat completions, messages, embeddings. It parses requests, builds the
request body for a backend that serves the same API, and parses the backend's answers. Other APIs are reached through a
translator (`translation`). To add one, write one file here, and name it in `ApiName`, in `registry.py`, and in the
contract (`fulmen.llm_proxy.v1.Api`, mapped in `routing/codec.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import msgspec

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields

T = TypeVar("T")

_MISSING = "It is missing."

TRUE = msgspec.Raw(b"true")
NULL = msgspec.Raw(b"null")
ABSENT = msgspec.Raw()
"""Default of an undecoded field of a struct; msgspec treats `Raw | None` as a field that is always null."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding input that is not JSON, not UTF-8, of the wrong type, or nested too deeply."""

TEXT: Final = msgspec.json.Decoder(str)
FLAG: Final = msgspec.json.Decoder(bool | None)
COUNT: Final = msgspec.json.Decoder(int | None)
"""Decoders of fields that requests have in common."""

decode_fields = msgspec.json.Decoder(Fields).decode
encode = msgspec.json.Encoder().encode


class ApiName(StrEnum):
    """Name of an API; the values also appear in settings and metrics."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"


class Dialect(StrEnum):
    """Vendor whose error format and headers an API uses."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request; its fields are kept as slices of the body.

    Attributes:
        stream: whether the caller wants a stream.
        asked: optional parts of the answer that the caller has requested.
        max_tokens: maximum number of completion tokens; None without a limit.
    """

    api: Api
    model: str
    stream: bool
    asked: Asked
    fields: Fields
    max_tokens: int | None = None


class AnswerReader(Protocol):
    """Reads one answer on its way to the caller; one object per try, used by one task.

    For a complete answer `whole` is called once; for a stream, `event` with each event and `end` after the last one.
    """

    @property
    def collected(self) -> Collected:
        """The slices of the backend's answer."""
        ...

    def whole(self, body: bytes) -> bytes:
        """Returns the answer for the caller."""
        ...

    def event(self, event: bytes) -> bytes:
        """Returns the events for the caller that replace this one, with terminators; may be empty."""
        ...

    def end(self) -> bytes:
        """Returns the events for the caller after the backend's last event."""
        ...


class Api(Protocol):
    """An API; stateless, shared by all calls.

    Attributes:
        path: path below the version prefix, such as `/chat/completions`.
        operation: `gen_ai.operation.name` of its spans.
        generates: whether answers are sampled. Other calls are recorded as spans only, without overrides of routes.
        is_metered: whether calls use tokens, which count towards limits and cost.
        can_capture: whether answers can carry token ids and log-probabilities.
    """

    name: ApiName
    dialect: Dialect
    path: str
    operation: str
    generates: bool
    is_metered: bool
    can_capture: bool

    def parse(self, body: bytes) -> CallRequest:
        """Parses a request.

        Raises:
            ArgumentInvalid: if it is not JSON, or a field that the proxy reads has the wrong type.
        """
        ...

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields, and those added for the capture."""
        ...

    def __hash__(self) -> int:
        """Hashes by identity."""
        ...

    def reader(self, asked: Asked) -> AnswerReader:
        """Returns a new reader that removes parts that were not requested."""
        ...

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Assembles the events of a stream to the complete answer, as JSON."""
        ...


EVERYTHING = Asked(token_ids=True, logprobs=True, stream_usage=True)
"""Nothing is removed from the answer of a call without capture."""


def read_fields(body: bytes, api: ApiName) -> Fields:
    """Returns the fields of a request's body as slices.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or not UTF-8. The message gives the position, never the content.
    """
    try:
        if not body.isascii():
            body.decode()  # slices are not decoded; the backend would be the first to fail
        return decode_fields(body)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The body is not a {api} request: {wrong(error)}.") from None


def wrong(error: Exception) -> str:
    """Describes one of the `UNREADABLE` errors without quoting the input."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    return str(error)


class RequestReader:
    """Reads the fields of a request that the proxy itself needs; reports all violations together."""

    __slots__ = ("_api", "_violations", "fields")

    def __init__(self, body: bytes, api: ApiName, required: Sequence[str]) -> None:
        """Splits a body into fields.

        Raises:
            ArgumentInvalid: if it is not a JSON object, or not UTF-8.
        """
        self._api = api
        self.fields = read_fields(body, api)
        self._violations = [Violation(field=name, description=_MISSING) for name in required if name not in self.fields]

    def get(self, name: str, decoder: msgspec.json.Decoder[T], default: T) -> T:
        """Returns a decoded field; the default if it is absent or invalid."""
        raw = self.fields.get(name)
        if raw is None:
            return default
        try:
            return decoder.decode(raw)
        except UNREADABLE as error:
            self._violations.append(Violation(field=name, description=f"{wrong(error)}."))
            return default

    def check(self) -> Fields:
        """Returns all fields.

        Raises:
            ArgumentInvalid: if fields are missing or of the wrong type; names all of them.
        """
        if self._violations:
            raise ArgumentInvalid(f"The body is not a {self._api} request:", violations=self._violations)
        return self.fields


def read(fields: Fields, name: str, decoder: msgspec.json.Decoder[T], default: T) -> T:
    """Returns a decoded field; the default if it is absent.

    Raises:
        ArgumentInvalid: if it has the wrong type.
    """
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        return decoder.decode(raw)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"Field `{name}` is invalid: {wrong(error)}.") from None


class _StreamFlag(msgspec.Struct):
    stream: bool | None = None


_STREAM_FLAG = msgspec.json.Decoder(_StreamFlag)


def asks_for_stream(body: bytes) -> bool:
    """Returns whether a request of any API asks for a stream; False if malformed."""
    try:
        return bool(_STREAM_FLAG.decode(body).stream)
    except UNREADABLE:
        return False


def given(raw: msgspec.Raw) -> bool:
    """Returns whether an undecoded field of a struct is present and not null."""
    return bytes(raw) not in (b"", b"null")


def require(fields: Fields, names: Iterable[str]) -> None:
    """Checks that fields are present.

    Raises:
        ArgumentInvalid: if any is missing; names all of them.
    """
    missing = [name for name in names if name not in fields]
    if missing:
        raise ArgumentInvalid(f"Missing fields: {', '.join(missing)}.")


def routed_fields(fields: Fields, *, model: str, asked_model: str, overrides: Mapping[str, msgspec.Raw]) -> Fields:
    """Returns the fields with the backend's model and the route's overrides; null removes a field."""
    routed = {**fields, **overrides}
    for name in [name for name, value in overrides.items() if not given(value)]:
        del routed[name]
    if model != asked_model:
        routed["model"] = msgspec.Raw(encode(model))
    return routed


def joined(events: Sequence[bytes]) -> bytes:
    """Joins events; fast for the usual single one."""
    return events[0] if len(events) == 1 else b"".join(events)
