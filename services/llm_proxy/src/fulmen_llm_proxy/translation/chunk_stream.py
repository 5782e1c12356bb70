"""Translates a Messages stream to the chunks of a chat stream.

Invariant: all chunks of an answer have the same id; a tool call starts with its id and name, and its joined arguments
are JSON; the stream ends with a finish reason and `[DONE]`, or with an error.
"""

from __future__ import annotations

import msgspec

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import ABSENT, UNREADABLE, ApiName, Dialect, encode, given
from fulmen_llm_proxy.apis.errors import error_event, error_in_stream
from fulmen_llm_proxy.apis.sse import DONE, encode_event, event_data
from fulmen_llm_proxy.translation.equivalents import JSON, MessageUsage, chat_id, chat_usage, finish_of
from fulmen_llm_proxy.translation.message_shapes import Block, Message, StopDetails

KEEP_ALIVE = b": ping\n\n"
"""A comment, since chat streams have no empty event."""


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: StopDetails | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: Message | None = None
    content_block: Block | None = None
    delta: _Delta | None = None
    usage: msgspec.Raw = ABSENT


_EVENT = msgspec.json.Decoder(_Event)
_USAGE = msgspec.json.Decoder(MessageUsage)


class ChunkStream:
    """Translates the events of one stream.

    Attributes:
        includes_usage: whether the caller requested a last chunk with the usage.
    """

    __slots__ = (
        "_arguments_sent",
        "_block",
        "_created",
        "_finish",
        "_id",
        "_model",
        "_over",
        "_signature",
        "_thinking",
        "_thoughts",
        "_tools",
        "_usage",
        "includes_usage",
    )

    def __init__(self, created: int) -> None:
        """Sets the creation time of the chunks, seconds since 1970."""
        self.includes_usage = False
        self._created = created
        self._id = ""
        self._model = ""
        self._block: Block | None = None
        self._tools = 0
        self._thoughts = 0
        self._arguments_sent = False
        self._thinking: list[str] = []
        self._signature: list[str] = []
        self._usage = MessageUsage()
        self._finish = ""
        self._over = False

    def event(self, event: bytes) -> list[bytes]:
        """Returns the caller's chunks for an event of the backend.

        Raises:
            BackendUnavailable: if it is not an event of a Messages stream.
        """
        data = None if self._over else event_data(event)
        if data is None:
            return []
        try:
            read = _EVENT.decode(data)
            return self._translate(read, data)
        except UNREADABLE as error:
            raise BackendUnavailable("The backend sent an event that does not belong to a message.") from error

    def end(self) -> list[bytes]:
        """Returns nothing if the message ended.

        Raises:
            BackendUnavailable: if the backend's stream ended before the message did.
        """
        if self._over:
            return []
        self._over = True
        if not self._finish:
            raise BackendUnavailable("The backend's stream ended before its answer did.")
        return self._stop()

    def _translate(self, event: _Event, data: bytes) -> list[bytes]:
        match event.type:
            case "content_block_delta" if event.delta is not None:
                return self._piece(event.delta)
            case "content_block_start" if event.content_block is not None:
                return self._open(event.content_block)
            case "content_block_stop":
                return self._close()
            case "message_start" if event.message is not None:
                self._id, self._model = chat_id(event.message.id), event.message.model
                self._usage = event.message.usage
                return [self._chunk({"role": "assistant", "content": ""})]
            case "message_delta":
                return self._finished(event)
            case "message_stop":
                self._over = True
                return self._stop()
            case "error":
                self._over = True
                return [error_event(error_in_stream(data), ApiName.CHAT, Dialect.OPENAI)]
            case "ping":
                return [KEEP_ALIVE]
        return []

    def _open(self, block: Block) -> list[bytes]:
        self._block = block
        match block.type:
            case "text" if block.text:
                return [self._chunk({"content": block.text})]
            case "thinking":
                self._thinking = [block.thinking] if block.thinking else []
                self._signature = [block.signature] if block.signature else []
                return [self._chunk({"reasoning_content": block.thinking})] if block.thinking else []
            case "tool_use":
                self._arguments_sent = False
                function = {"name": block.name or "", "arguments": ""}
                return [self._call({"id": block.id or "", "type": "function", "function": function})]
        return []

    def _piece(self, delta: _Delta) -> list[bytes]:
        match delta.type:
            case "text_delta" if delta.text:
                return [self._chunk({"content": delta.text})]
            case "thinking_delta" if delta.thinking:
                self._thinking.append(delta.thinking)
                return [self._chunk({"reasoning_content": delta.thinking})]
            case "signature_delta":
                self._signature.append(delta.signature)
            case "input_json_delta" if delta.partial_json and self._is_tool():
                self._arguments_sent = True
                return [self._call({"function": {"arguments": delta.partial_json}})]
        return []

    def _close(self) -> list[bytes]:
        block, out = self._block, []
        if block is None:
            return []
        if block.type == "tool_use":
            if not self._arguments_sent:
                arguments = bytes(block.input).decode() if given(block.input) else "{}"
                out.append(self._call({"function": {"arguments": arguments}}))
            self._tools += 1
        elif block.type == "thinking":
            thinking, signature = "".join(self._thinking), "".join(self._signature)
            out.append(self._thought({"type": "thinking", "thinking": thinking, "signature": signature}))
        elif block.type == "redacted_thinking":
            out.append(self._thought({"type": "redacted_thinking", "data": block.data or ""}))
        self._block = None
        return out

    def _finished(self, event: _Event) -> list[bytes]:
        if given(event.usage):
            usage = _USAGE.decode(event.usage)
            for name in MessageUsage.__struct_fields__:
                value = getattr(usage, name)
                if value is not None:
                    setattr(self._usage, name, value)
        delta = event.delta
        if delta is None or not delta.stop_reason:
            return []
        self._finish = finish_of(delta.stop_reason)
        last: JSON = {}
        if delta.stop_reason == "refusal" and delta.stop_details and delta.stop_details.explanation:
            last["refusal"] = delta.stop_details.explanation
        return [self._chunk(last, finish_reason=self._finish, matched=delta.stop_sequence)]

    def _stop(self) -> list[bytes]:
        out = []
        if not self._finish:
            out.append(self._chunk({}, finish_reason=finish_of(None)))
        if self.includes_usage:
            out.append(encode_event(encode(self._envelope() | {"choices": [], "usage": chat_usage(self._usage)})))
        out.append(encode_event(DONE))
        return out

    def _is_tool(self) -> bool:
        return self._block is not None and self._block.type == "tool_use"

    def _call(self, call: JSON) -> bytes:
        return self._chunk({"tool_calls": [{"index": self._tools, **call}]})

    def _thought(self, thought: JSON) -> bytes:
        self._thoughts += 1
        return self._chunk({"thinking_blocks": [{"index": self._thoughts - 1, **thought}]})

    def _chunk(self, delta: JSON, *, finish_reason: str | None = None, matched: str | None = None) -> bytes:
        choice: JSON = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if matched is not None:
            choice["stop_reason"] = matched
        return encode_event(encode(self._envelope() | {"choices": [choice]}))

    def _envelope(self) -> JSON:
        return {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
