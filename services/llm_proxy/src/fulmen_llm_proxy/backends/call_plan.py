"""The plan of a call: the request of one try, and the reader of its answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Protocol

import msgspec
import msgspec.structs

from fulmen.errors import ArgumentInvalid, BackendUnavailable, Unimplemented
from fulmen_llm_proxy.apis.api import (
    EVERYTHING,
    UNREADABLE,
    AnswerReader,
    Api,
    ApiName,
    CallRequest,
    decode_fields,
    routed_fields,
)
from fulmen_llm_proxy.apis.chat import with_usage
from fulmen_llm_proxy.apis.chat_events import WholeAsEvents
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.completion_events import WholeCompletionAsEvents
from fulmen_llm_proxy.apis.errors import error_document, refusal_of
from fulmen_llm_proxy.apis.registry import APIS, CAPTURED
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.routing.engines import PROFILES
from fulmen_llm_proxy.routing.table import Choice
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat
from fulmen_llm_proxy.translation.responses_to_chat import ResponsesToChat
from fulmen_llm_proxy.translation.translator import Translator


class _MakeTranslator(Protocol):
    def __call__(self, *, drops: bool) -> Translator: ...


_TRANSLATORS: Mapping[tuple[ApiName, ApiName], _MakeTranslator] = {
    (ApiName.RESPONSES, ApiName.CHAT): ResponsesToChat,
    (ApiName.MESSAGES, ApiName.CHAT): MessagesToChat,
    (ApiName.CHAT, ApiName.MESSAGES): ChatToMessages,
}
"""Translators by the caller's and the backend's API."""

_WHOLE_AS_EVENTS: Mapping[ApiName, Callable[[Asked], AnswerReader]] = {
    ApiName.CHAT: WholeAsEvents,
    ApiName.COMPLETIONS: WholeCompletionAsEvents,
}
"""Readers by the backend's API that make a stream of a complete answer; all APIs that can be captured have one."""

_OF_STREAMS = frozenset({"stream", "stream_options"})
_MAX_EVENT_BYTES = 1 << 31  # of translated events; the backend's own are bounded before


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one try, made from the routing table of that moment.

    Attributes:
        api: API of the request to the backend.
        caller_api: API of the caller's request.
        fields: fields of the backend's request, without those added for the capture.
        captured: whether token ids and log-probabilities are requested.
        stream: whether a stream is requested from the backend.
        whole_as_stream: whether the caller wants a stream but a complete answer is requested from the backend;
            `reader.event` then takes that answer and returns the stream.
        dropped: names of parameters of the caller's request that the backend's API cannot express.
    """

    api: Api
    caller_api: Api
    body: bytes
    fields: Fields
    captured: bool
    stream: bool
    whole_as_stream: bool
    reader: AnswerReader
    dropped: tuple[str, ...] = ()

    def whole(self, body: bytes) -> bytes:
        """Returns a complete answer in the caller's API; as a stream if `whole_as_stream`.

        Raises:
            BackendUnavailable: if it is not a JSON object. An object with unexpected types passes.
        """
        reader = self.reader
        passed = reader.event(body) + reader.end() if self.whole_as_stream else reader.whole(body)
        if reader.collected.malformed and not _is_object(body):
            raise BackendUnavailable("The backend's answer is not a JSON object.")
        return passed

    def refusal(self, status: int, body: bytes) -> bytes:
        """Returns a backend's error in the caller's dialect; unchanged if it is JSON in the same dialect."""
        if self.api.dialect is self.caller_api.dialect and _is_object(body):
            return body
        return error_document(refusal_of(status, body), self.caller_api.dialect)


def _is_object(body: bytes) -> bool:
    try:
        decode_fields(body)
    except UNREADABLE:
        return False
    return True


def plan_call(
    request: CallRequest,
    choice: Choice,
    *,
    overrides: Mapping[str, msgspec.Raw],
    attributed: bool,
    whole: bool = False,
) -> CallPlan:
    """Plans one try.

    An attempt's call to a trainable target uses an API whose answers carry token ids, if the backend serves one: a
    translated call that can be trained on is worth more than an untranslated one that cannot.

    Args:
        attributed: whether the call belongs to an attempt.
        whole: whether the answer of a captured call will be complete, though the caller wants a stream.

    Raises:
        Unimplemented: if the backend serves no API to which the call can be translated.
        ArgumentInvalid: if the request cannot be expressed in that API.
    """
    backend, target = choice.backend, choice.target
    wanted = attributed and bool(target.policy) and backend.returns_token_ids
    steps = _translation_path(request.api.name, backend.apis & CAPTURED) if wanted else None
    captured = steps is not None
    if steps is None:
        steps = _translation_path(request.api.name, backend.apis)
    if steps is None:
        raise Unimplemented(
            f"The backend of the model '{request.model}' does not serve {request.api.name}, and there is "
            f"no translation to any API that it serves ({', '.join(sorted(backend.apis))}).",
        )
    api = APIS[steps[-1]]
    set_by_route = overrides if request.api.generates else {}
    fields = routed_fields(request.fields, model=target.model, asked_model=request.model, overrides=set_by_route)
    whole_as_stream = request.stream and captured and (whole or api.name not in PROFILES[backend.engine].ids_in_streams)
    make_reader = _WHOLE_AS_EVENTS[api.name] if whole_as_stream else api.reader
    reader: AnswerReader
    dropped: list[str] = []
    if len(steps) == 1:
        asked = (
            request.asked if captured else msgspec.structs.replace(EVERYTHING, stream_usage=request.asked.stream_usage)
        )
        reader = make_reader(asked)
    else:
        translators = [_TRANSLATORS[step](drops=backend.drop_params) for step in pairwise(steps)]
        try:
            fields = _translated(fields, translators, stream=request.stream)
        except RecursionError:
            raise ArgumentInvalid("The request is nested too deeply.") from None
        reader = TranslatedReader(make_reader(_asked_by(translators)), translators)
        dropped = [name for translator in translators for name in translator.unsupported.dropped]
    if whole_as_stream:
        fields = {name: value for name, value in fields.items() if name not in _OF_STREAMS}
    stream = request.stream and not whole_as_stream
    return CallPlan(
        api=api,
        caller_api=request.api,
        body=api.body(fields, stream=stream, capture=captured),
        fields=fields,
        captured=captured,
        stream=stream,
        whole_as_stream=whole_as_stream,
        reader=reader,
        dropped=tuple(dropped),
    )


def _translated(fields: Fields, translators: list[Translator], *, stream: bool) -> Fields:
    """Translates the request step by step; each translator passes the stream options that it needs to the next."""
    for position, translator in enumerate(translators):
        if stream and position > 0 and translators[position - 1].asked.stream_usage:
            fields = {**fields, "stream_options": with_usage(fields.get("stream_options"))}
        fields = translator.request(fields)
    return fields


def _asked_by(translators: list[Translator]) -> Asked:
    return translators[-1].asked


class TranslatedReader:
    """Reads an answer in the backend's API and returns it in the caller's."""

    __slots__ = ("_reader", "_splitters", "_translators")

    def __init__(self, reader: AnswerReader, translators: list[Translator]) -> None:
        """Sets the backend's reader, and the translators in the order of the request."""
        self._reader = reader
        self._translators = translators[::-1]
        self._splitters = [EventSplitter(_MAX_EVENT_BYTES) for _ in translators]

    @property
    def collected(self) -> Collected:
        """The slices of the backend's answer."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer in the caller's API."""
        body = self._reader.whole(body)
        for translator in self._translators:
            body = translator.whole(body)
        return body

    def event(self, event: bytes) -> bytes:
        """Returns the events in the caller's API that replace this one."""
        return self._through(0, self._reader.event(event))

    def end(self) -> bytes:
        """Returns the events that end the caller's stream."""
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


def _translation_path(caller: ApiName, served: Collection[ApiName]) -> tuple[ApiName, ...] | None:
    """Returns the APIs from the caller's to a served one, both included; None if there is no path.

    The shortest path wins, of at most two steps; chat completions are first, since their tokens can be captured.
    """
    if caller in served:
        return (caller,)
    steps = [target for source, target in _TRANSLATORS if source is caller]
    steps.sort(key=lambda name: name is not ApiName.CHAT)
    for step in steps:
        if step in served:
            return (caller, step)
    for step in steps:
        for source, target in _TRANSLATORS:
            if source is step and target in served and target is not caller:
                return (caller, step, target)
    return None
