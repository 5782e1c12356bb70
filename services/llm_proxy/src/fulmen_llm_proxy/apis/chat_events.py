"""A whole chat completion as the events of a stream.

For engines whose streams bring no token ids: the backend is asked for a whole answer, and the caller
who wanted a stream gets it in a few events at once. Nothing is made up: every event says a part of
the answer, in the order in which a stream would.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fulmen_llm_proxy.apis.api import encode
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.apis.sse import DONE, encode_event

JSON = dict[str, Any]  # Any: the answer is the backend's own, of any depth

_DECODE = msgspec.json.Decoder(JSON).decode
_OF_THE_ANSWER = frozenset({"choices", "usage", "object", "prompt_token_ids"})
_OF_THE_END = frozenset({"finish_reason", "stop_reason", "matched_stop"})


class WholeAsEvents:
    """Reads a whole answer and hands it on as events; `event` is given the whole answer as if it were one."""

    __slots__ = ("_asked", "_reader")

    def __init__(self, asked: Asked) -> None:
        """Takes what the caller asked for."""
        self._asked = asked
        self._reader = ChatReader(asked)

    @property
    def collected(self) -> Collected:
        """What the answer brought."""
        return self._reader.collected

    def whole(self, body: bytes) -> bytes:
        """Returns the answer as it is, stripped."""
        return self._reader.whole(body)

    def event(self, event: bytes) -> bytes:
        """Returns the events of the answer; the answer itself if it is none."""
        answer = self._reader.whole(event)
        if self.collected.malformed:
            return encode_event(answer.replace(b"\n", b" "))
        try:
            return b"".join(encode_event(document) for document in chunks_of(answer, usage=self._asked.stream_usage))
        except (AttributeError, TypeError):  # a message or a tool call that is no object
            self.collected.malformed = True
            return encode_event(answer.replace(b"\n", b" "))

    def end(self) -> bytes:
        """Returns nothing: the events of the answer are all."""
        return b""


def chunks_of(answer: bytes, *, usage: bool) -> list[bytes]:
    """Returns the data of the events that a whole chat completion amounts to.

    Args:
        usage: the last one before the end tells the usage.

    Raises:
        msgspec.DecodeError: if the answer is not a JSON object.
    """
    whole = _DECODE(answer)
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
