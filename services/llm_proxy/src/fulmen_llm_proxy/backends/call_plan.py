"""What one try of a call sends to its backend, and how the answer will be read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec
import msgspec.structs

from fulmen.errors import ArgumentInvalid, BackendUnavailable, Unimplemented
from fulmen_llm_proxy.apis.api import (
    EVERYTHING,
    UNREADABLE,
    AnswerReader,
    Api,
    CallRequest,
    decode_fields,
    routed_fields,
)
from fulmen_llm_proxy.apis.chat import with_usage
from fulmen_llm_proxy.apis.chat_events import WholeAsEvents
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.errors import error_document, refusal_of
from fulmen_llm_proxy.apis.registry import APIS, CAPTURED
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.routing.engines import PROFILES
from fulmen_llm_proxy.routing.table import Choice
from fulmen_llm_proxy.translation.registry import TRANSLATORS, way
from fulmen_llm_proxy.translation.translator import Translator

_OF_STREAMS = frozenset({"stream", "stream_options"})
_MAX_EVENT_BYTES = 1 << 31  # of our own translators' events: bounded by the backend's, which are


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One try, planned on the routing table of one moment.

    Attributes:
        api: the API that the backend is called by.
        caller_api: the API that the caller called by.
        fields: the request's fields as the backend gets them, without what the capture added.
        captured: token ids and log-probabilities are asked of the backend.
        stream: the backend is asked for a stream.
        whole_as_stream: the caller wants a stream, the backend is asked for a whole answer: `reader.event` is given
            that, and returns the stream.
    """

    api: Api
    caller_api: Api
    body: bytes
    fields: Fields
    captured: bool
    stream: bool
    whole_as_stream: bool
    reader: AnswerReader

    def whole(self, body: bytes) -> bytes:
        """Returns a whole answer in the caller's API; as a stream, if the caller wants one and the backend has none.

        Raises:
            BackendUnavailable: if it is no JSON object. What only has other types than its API promises passes.
        """
        reader = self.reader
        passed = reader.event(body) + reader.end() if self.whole_as_stream else reader.whole(body)
        if reader.collected.malformed and not _is_object(body):
            raise BackendUnavailable("The backend's answer is not a JSON object.")
        return passed

    def refusal(self, status: int, body: bytes) -> bytes:
        """Returns a backend's refusal as the caller's API words it; as it is if it is JSON and the dialect is the same."""
        if self.api.dialect is self.caller_api.dialect and _is_object(body):
            return body
        return error_document(refusal_of(status, body), self.caller_api.dialect)


def _is_object(body: bytes) -> bool:
    try:
        decode_fields(body)
    except UNREADABLE:
        return False
    return True


def plan_exchange(
    request: CallRequest, choice: Choice, *, overrides: Mapping[str, msgspec.Raw], attributed: bool
) -> Exchange:
    """Plans one try.

    An agent's call on a trainable target goes by an API whose answers carry token ids, if the
    backend serves one: a translated call that can be trained on is worth more than an untranslated
    one that cannot.

    Args:
        attributed: the call belongs to an attempt.

    Raises:
        Unimplemented: if the backend serves no API that can stand in for the caller's.
        ArgumentInvalid: if the one that can cannot say what this request says.
    """
    backend, target = choice.backend, choice.target
    wanted = attributed and bool(target.policy) and backend.returns_token_ids
    steps = way(request.api.name, backend.apis & CAPTURED) if wanted else None
    captured = steps is not None
    if steps is None:
        steps = way(request.api.name, backend.apis)
    if steps is None:
        raise Unimplemented(
            f"The backend of the model '{request.model}' does not serve {request.api.name}, and what it serves "
            f"({', '.join(sorted(backend.apis))}) cannot stand in for it.",
        )
    api = APIS[steps[-1]]
    set_by_route = overrides if request.api.generates else {}
    fields = routed_fields(request.fields, model=target.model, asked_model=request.model, overrides=set_by_route)
    whole_as_stream = request.stream and captured and api.name not in PROFILES[backend.engine].ids_in_streams
    make_reader = WholeAsEvents if whole_as_stream else api.reader
    reader: AnswerReader
    if len(steps) == 1:
        asked = (
            request.asked if captured else msgspec.structs.replace(EVERYTHING, stream_usage=request.asked.stream_usage)
        )
        reader = make_reader(asked)
    else:
        translators = [TRANSLATORS[step]() for step in pairwise(steps)]
        try:
            fields = _translated(fields, translators, stream=request.stream)
        except RecursionError:
            raise ArgumentInvalid("The request is nested too deeply.") from None
        reader = TranslatedReader(make_reader(_asked_by(translators)), translators)
    if whole_as_stream:
        fields = {name: value for name, value in fields.items() if name not in _OF_STREAMS}
    stream = request.stream and not whole_as_stream
    return Exchange(
        api=api,
        caller_api=request.api,
        body=api.body(fields, stream=stream, capture=captured),
        fields=fields,
        captured=captured,
        stream=stream,
        whole_as_stream=whole_as_stream,
        reader=reader,
    )


def _translated(fields: Fields, translators: list[Translator], *, stream: bool) -> Fields:
    """Takes the request through the translators; what one needs of a stream, it asks of the next."""
    for position, translator in enumerate(translators):
        if stream and position > 0 and translators[position - 1].asked.stream_usage:
            fields = {**fields, "stream_options": with_usage(fields.get("stream_options"))}
        fields = translator.request(fields)
    return fields


def _asked_by(translators: list[Translator]) -> Asked:
    return translators[-1].asked


class TranslatedReader:
    """Reads an answer in the backend's API and hands it on in the caller's."""

    __slots__ = ("_reader", "_splitters", "_translators")

    def __init__(self, reader: AnswerReader, translators: list[Translator]) -> None:
        """Takes the translators in the order in which the request went through them."""
        self._reader = reader
        self._translators = translators[::-1]
        self._splitters = [EventSplitter(_MAX_EVENT_BYTES) for _ in translators]

    @property
    def collected(self) -> Collected:
        """What the backend's answer brought."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer in the caller's API."""
        body = self._reader.whole(body)
        for translator in self._translators:
            body = translator.whole(body)
        return body

    def event(self, event: bytes) -> bytes:
        """Returns the events of the caller's API in place of this one."""
        return self._through(0, self._reader.event(event))

    def end(self) -> bytes:
        """Returns the events that close the caller's stream."""
        out = self._through(0, self._reader.end())
        for index, translator in enumerate(self._translators):
            out += self._through(index + 1, b"".join(translator.end()))
        return out

    def _through(self, first: int, events: bytes) -> bytes:
        for index in range(first, len(self._translators)):
            if not events:
                return b""
            translator = self._translators[index]
            events = b"".join([out for event in self._splitters[index].feed(events) for out in translator.event(event)])
        return events
