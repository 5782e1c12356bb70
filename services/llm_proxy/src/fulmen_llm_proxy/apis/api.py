"""What an API is to the proxy.

An API is one kind of call with its own JSON: chat completions, messages, embeddings. It reads
requests, makes the body for a backend that serves the same API, and takes a backend's answers
apart. What it cannot say itself, a translator (`translation`) says for it. To add one,
write one file here, name it in `ApiName` and in `registry.py`, and in the contract
(`fulmen.llm_proxy.v1.Api`) with its line in `routing/codec.py`.
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
"""The default of a struct's undecoded field. msgspec takes `Raw | None` for a field that can only be null."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises on what is no JSON, no UTF-8, of other types, or nested too deeply."""

TEXT: Final = msgspec.json.Decoder(str)
FLAG: Final = msgspec.json.Decoder(bool | None)
COUNT: Final = msgspec.json.Decoder(int | None)
"""For the fields that requests have in common."""

decode_fields = msgspec.json.Decoder(Fields).decode
encode = msgspec.json.Encoder().encode


class ApiName(StrEnum):
    """Names an API; the values are also what settings and metrics say."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"


class Dialect(StrEnum):
    """Whose wording of errors, and whose headers, an API uses."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its outline read, its fields kept as slices of the body.

    Attributes:
        stream: the caller wants the answer as events.
        asked: what of the answer the caller asked for.
        max_tokens: most completion tokens that the caller asks for; None without a limit.
    """

    api: Api
    model: str
    stream: bool
    asked: Asked
    fields: Fields
    max_tokens: int | None = None


class AnswerReader(Protocol):
    """Reads one answer on its way to the caller; one object per try, used by one task.

    For a whole answer `whole` is called once; for a stream `event` with each event, and `end` after
    the last one.
    """

    @property
    def collected(self) -> Collected:
        """What the backend's answer brought."""
        ...

    def whole(self, body: bytes) -> bytes:
        """Returns the answer as the caller should see it."""
        ...

    def event(self, event: bytes) -> bytes:
        """Returns the events that the caller should see in place of this one, with terminators; may be empty."""
        ...

    def end(self) -> bytes:
        """Returns what the caller should still see after the backend's last event."""
        ...


class Api(Protocol):
    """One API. Stateless; shared by all calls.

    Attributes:
        path: below the version prefix, such as `/chat/completions`.
        operation: `gen_ai.operation.name` of its spans.
        generates: answers are sampled. Calls of the others are recorded as spans alone, and routes set nothing in them.
        is_metered: calls use tokens, which limits and costs count.
        can_capture: answers can carry token ids and log-probabilities.
    """

    name: ApiName
    dialect: Dialect
    path: str
    operation: str
    generates: bool
    is_metered: bool
    can_capture: bool

    def parse(self, body: bytes) -> CallRequest:
        """Reads a request.

        Raises:
            ArgumentInvalid: if it is not JSON, or a field that the proxy reads has a wrong type.
        """
        ...

    def body(self, fields: Fields, *, stream: bool, capture: bool) -> bytes:
        """Returns the body for a backend: the fields, and what the capture adds to them."""
        ...

    def __hash__(self) -> int:
        """APIs are told apart by being different objects."""
        ...

    def reader(self, asked: Asked) -> AnswerReader:
        """Returns a new reader that hides what was not asked for."""
        ...

    def assemble(self, payloads: list[bytes]) -> bytes:
        """Returns the whole answer that the events of a stream amount to, as JSON."""
        ...


EVERYTHING = Asked(token_ids=True, logprobs=True, stream_usage=True)
"""Of a call without capture nothing is hidden."""


def read_fields(body: bytes, api: ApiName) -> Fields:
    """Returns the fields of a request's body as slices.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or not UTF-8. The text names the place, never the content.
    """
    try:
        if not body.isascii():
            body.decode()  # slices are not looked into: a backend would be the first to stumble over them
        return decode_fields(body)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The body is not a {api} request: {wrong(error)}.") from None


def wrong(error: Exception) -> str:
    """Says what one of `UNREADABLE` found, without what it found it in."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    return str(error)


class RequestReader:
    """Reads the fields that the proxy itself needs of a request, and tells every problem of it at once."""

    __slots__ = ("_api", "_violations", "fields")

    def __init__(self, body: bytes, api: ApiName, required: Sequence[str]) -> None:
        """Takes a body apart.

        Raises:
            ArgumentInvalid: if it is not a JSON object, or not UTF-8.
        """
        self._api = api
        self.fields = read_fields(body, api)
        self._violations = [Violation(field=name, description=_MISSING) for name in required if name not in self.fields]

    def take(self, name: str, decoder: msgspec.json.Decoder[T], default: T) -> T:
        """Returns one field, decoded; the default if it is absent or wrong."""
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
            ArgumentInvalid: if one is missing or of a wrong type; names all of them.
        """
        if self._violations:
            raise ArgumentInvalid(f"The body is not a {self._api} request:", violations=self._violations)
        return self.fields


def read(fields: Fields, name: str, decoder: msgspec.json.Decoder[T], default: T) -> T:
    """Returns one field, decoded; the default if it is absent.

    Raises:
        ArgumentInvalid: if it has a wrong type.
    """
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        return decoder.decode(raw)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The field `{name}` is wrong: {wrong(error)}.") from None


class _StreamFlag(msgspec.Struct):
    stream: bool | None = None


_STREAM_FLAG = msgspec.json.Decoder(_StreamFlag)


def asks_for_stream(body: bytes) -> bool:
    """Tells whether a request of whatever API asks for a stream; what is malformed does not."""
    try:
        return bool(_STREAM_FLAG.decode(body).stream)
    except UNREADABLE:
        return False


def given(raw: msgspec.Raw) -> bool:
    """Tells whether a struct's undecoded field is there and not null."""
    return bytes(raw) not in (b"", b"null")


def require(fields: Fields, names: Iterable[str]) -> None:
    """Checks that fields are present.

    Raises:
        ArgumentInvalid: naming all that are missing.
    """
    missing = [name for name in names if name not in fields]
    if missing:
        raise ArgumentInvalid(f"The request lacks: {', '.join(missing)}.")


def routed_fields(fields: Fields, *, model: str, asked_model: str, overrides: Mapping[str, msgspec.Raw]) -> Fields:
    """Returns a request's fields with the backend's model name and the route's overrides; one that is null leaves out."""
    routed = {**fields, **overrides}
    for name in [name for name, value in overrides.items() if not given(value)]:
        del routed[name]
    if model != asked_model:
        routed["model"] = msgspec.Raw(encode(model))
    return routed


def joined(events: Sequence[bytes]) -> bytes:
    """Joins events; most often there is one."""
    return events[0] if len(events) == 1 else b"".join(events)


PROTECTED_FIELDS = frozenset(
    {"model", "messages", "input", "prompt", "stream", "stream_options", "return_token_ids", "logprobs"}
)
"""Fields that a route may not override: they are the caller's, or the capture's."""


def parse_overrides(text: str) -> Fields:
    """Reads the JSON object of a route's sampling overrides.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or names a field that a route may not set.
    """
    if not text:
        return {}
    try:
        fields = decode_fields(text.encode())
    except UNREADABLE as error:
        raise ArgumentInvalid(f"Sampling overrides must be a JSON object: {wrong(error)}.") from None
    refused = sorted(PROTECTED_FIELDS & fields.keys())
    if refused:
        raise ArgumentInvalid(f"A route may not override: {', '.join(refused)}.")
    return fields
