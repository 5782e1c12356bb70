"""Translates Responses to chat completions, whose tokens can be captured."""

from __future__ import annotations

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, encode, wrong
from fulmen_llm_proxy.apis.collected import Asked, Fields
from fulmen_llm_proxy.apis.sse import DONE, event_data
from fulmen_llm_proxy.translation.chat_pieces import Answer, Delta, Fault, Usage, decode_answer
from fulmen_llm_proxy.translation.responses_answer import ResponseBuilder
from fulmen_llm_proxy.translation.responses_request import chat_request, wants_logprobs
from fulmen_llm_proxy.translation.responses_tools import OwnTool, own_tools
from fulmen_llm_proxy.translation.translator import UnsupportedFields

_SERVER_ERROR = "server_error"
_RATE_LIMIT = "rate_limit_exceeded"


class ResponsesToChat:
    """Translates one try; see `Translator`."""

    def __init__(self, *, drops: bool = False) -> None:
        """Sets whether parameters are dropped."""
        self.asked = Asked(stream_usage=True)
        self.unsupported = UnsupportedFields(ApiName.CHAT, drops=drops)
        self._fields: Fields = {}
        self._tools: dict[str, OwnTool] = {}
        self._builder = ResponseBuilder({}, {}, streaming=True)
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._service_tier: str | None = None

    def request(self, fields: Fields) -> Fields:
        """Returns the chat completions request."""
        chat = chat_request(fields, self.unsupported)
        self._fields = fields
        self._tools = own_tools(fields)
        self._builder = ResponseBuilder(fields, self._tools, streaming=True)
        self.asked = Asked(stream_usage=True, logprobs=wants_logprobs(fields))
        return chat

    def whole(self, body: bytes) -> bytes:
        """Returns the `response` object for the first choice of a chat completion."""
        try:
            answer = decode_answer(body)
        except UNREADABLE as error:
            raise BackendUnavailable(f"The backend's answer is not a chat completion: {wrong(error)}.") from None
        if not answer.choices:
            raise BackendUnavailable("The backend's answer has no choice.")
        builder = ResponseBuilder(self._fields, self._tools, streaming=False)
        builder.start(answer_id=answer.id, created=answer.created, model=answer.model)
        choice = answer.choices[0]
        builder.add(choice.message or Delta(), (choice.logprobs and choice.logprobs.content) or ())
        return encode(builder.finish(choice.finish_reason, answer.usage, answer.service_tier))

    def event(self, event: bytes) -> list[bytes]:
        """Returns the events for a chunk; comments pass unchanged, since they keep connections alive."""
        data = event_data(event)
        if data is None:
            return [event]
        if self._builder.over:
            return []
        if data == DONE:
            return self._end(done=True)
        try:
            answer = decode_answer(data)
        except UNREADABLE:
            self._builder.fail(_SERVER_ERROR, "The backend sent an event that does not belong to a chat completion.")
            return self._builder.drain()
        self._add(answer)
        return self._builder.drain()

    def end(self) -> list[bytes]:
        """Returns the last events, unless they have already been returned."""
        return self._end(done=False)

    def _end(self, *, done: bool) -> list[bytes]:
        builder = self._builder
        if not builder.over:
            if not builder.started or not (done or self._finish_reason):
                builder.fail(_SERVER_ERROR, "The backend's answer ended before it was complete.")
            else:
                builder.finish(self._finish_reason, self._usage, self._service_tier)
        return builder.drain()

    def _add(self, answer: Answer) -> None:
        builder = self._builder
        if answer.error is not None:
            fault = Fault(message=answer.error) if isinstance(answer.error, str) else answer.error
            limited = "rate_limit" in f"{fault.code} {fault.type}"
            builder.fail(_RATE_LIMIT if limited else _SERVER_ERROR, fault.message or "The backend failed.")
            return
        if not builder.started:
            if not (answer.id or answer.choices):
                return  # Azure first sends the result of its prompt filter in an event without an id
            builder.start(answer_id=answer.id, created=answer.created, model=answer.model)
        for choice in answer.choices:
            if choice.index == 0:
                builder.add(choice.delta or Delta(), (choice.logprobs and choice.logprobs.content) or ())
                self._finish_reason = choice.finish_reason or self._finish_reason
        self._usage = answer.usage or self._usage
        self._service_tier = answer.service_tier or self._service_tier
