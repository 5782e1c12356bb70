"""Converts a complete chat completion to the events of a stream.

For engines whose streams contain no token ids: the proxy requests a complete answer from the backend, and the caller
receives it as a few events in one piece. Every event contains a part of the answer, in the order of a stream.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE, encode
from fulmen_llm_proxy.apis.assembly import JSON, decode_as
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.apis.sse import DONE, encode_event

_OF_THE_ANSWER = frozenset({"choices", "usage", "object", "prompt_token_ids"})
_OF_THE_END = frozenset({"finish_reason", "stop_reason", "matched_stop"})


class _Message(msgspec.Struct):
    tool_calls: list[JSON] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None


class WholeAsEvents:
    """Reads a complete answer and returns it as events; `event` takes the complete answer."""

    __slots__ = ("_asked", "_reader")

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._reader = ChatReader(asked)

    @property
    def collected(self) -> Collected:
        """The slices of the answer."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer without the parts that were not requested."""
        return self._reader.whole(body)

    def event(self, event: bytes) -> bytes:
        """Returns the events of the answer; the input itself as an event if it is malformed."""
        answer = self._reader.whole(event)
        if self.collected.malformed:
            return encode_event(answer)
        try:
            return b"".join(encode_event(document) for document in chunks_of(answer, usage=self._asked.stream_usage))
        except UNREADABLE:
            self.collected.malformed = True
            return encode_event(answer)

    def end(self) -> bytes:
        """Returns nothing: `event` has returned everything."""
        return b""


def chunks_of(answer: bytes, *, usage: bool) -> list[bytes]:
    """Returns the data of the events of a complete chat completion.

    Args:
        usage: whether to add an event with the usage before the end.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: `UNREADABLE`, if it is none.
    """
    whole = decode_as(_Answer, answer)
    envelope = {key: value for key, value in whole.items() if key not in _OF_THE_ANSWER}
    envelope["object"] = "chat.completion.chunk"
    documents: list[JSON] = []
    for choice in whole.get("choices") or ():
        index = choice.get("index", 0)
        said = {key: value for key, value in choice.items() if key not in _OF_THE_END and key != "message"}
        ended = {key: value for key, value in choice.items() if key in _OF_THE_END}
        begin = {**said, "delta": _delta(choice.get("message") or {}), "finish_reason": None}
        documents += [
            {**envelope, "choices": [begin]},
            {**envelope, "choices": [{"index": index, "delta": {}, "logprobs": None, **ended}]},
        ]
    if documents and "prompt_token_ids" in whole:
        documents[0]["prompt_token_ids"] = whole["prompt_token_ids"]
    if usage and "usage" in whole:
        documents.append({**envelope, "choices": [], "usage": whole["usage"]})
    return [*map(encode, documents), DONE]


def _delta(message: JSON) -> JSON:
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
