"""Chat completions and their parts, as servers say them, and Messages blocks beside them."""

from __future__ import annotations

import json
from typing import Any

JSON = dict[str, Any]


def user(*blocks: JSON) -> JSON:
    """Returns a user's turn or message."""
    return {"role": "user", "content": list(blocks)}


def text(said: str) -> JSON:
    """Returns a text block, which is a text part too."""
    return {"type": "text", "text": said}


def tool_use(name: str = "add", tool_id: str = "toolu_1", **given_input: Any) -> JSON:
    """Returns a tool_use block."""
    return {"type": "tool_use", "id": tool_id, "name": name, "input": given_input}


def tool_call(name: str = "add", tool_id: str = "toolu_1", arguments: str = "{}") -> JSON:
    """Returns a tool call."""
    return {"id": tool_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def completion(message: JSON, finish: str | None = "stop", **choice: Any) -> bytes:
    """Returns a whole answer with usage."""
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    full = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}
    return json.dumps({"id": "chatcmpl-7", "model": "m", "choices": [full], "usage": usage}).encode()


def chunk(delta: JSON, finish: str | None = None, **choice: Any) -> JSON:
    """Returns one chunk of a stream."""
    full = {"index": 0, "delta": delta, "finish_reason": finish, **choice}
    return {"id": "chatcmpl-7", "object": "chat.completion.chunk", "model": "m", "choices": [full]}


def call_piece(index: int | None, arguments: str = "", **more: Any) -> JSON:
    """Returns a piece of a tool call."""
    function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    return {"tool_calls": [{"function": function, **({} if index is None else {"index": index}), **more}]}


USAGE = {"id": "chatcmpl-7", "choices": [], "usage": json.loads(completion({}))["usage"]}
ROLE = chunk({"role": "assistant", "content": ""})


def stream_of(*documents: JSON, done: bool = True) -> bytes:
    """Returns chunks as a stream."""
    events = [b"data: " + json.dumps(document).encode() for document in documents]
    return b"".join(event + b"\n\n" for event in [*events, *([b"data: [DONE]"] if done else [])])
