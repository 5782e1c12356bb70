"""What the canned backend answers, and by which marks in a request it is asked for.

The marks stand in the text of the message, which every proxy passes on: `size:small` or `size:rl`, and for streams
`pace:MS`, the milliseconds from one event to the next (0: all at once). Ids, log-probabilities and usage come only if
the request asks for them, as a model server does it.
"""

from __future__ import annotations

import json
from typing import Any

SMALL_BYTES = 581
PROMPT_TOKENS, COMPLETION_TOKENS = 1024, 256
SMALL_PROMPT_TOKENS, SMALL_COMPLETION_TOKENS = 24, 12
STREAM_TOKENS = 63
STREAM_EVENTS = STREAM_TOKENS + 3
"""What a caller gets: the role, the tokens, the end, `[DONE]`; the usage is one more, if it is asked for."""
PACE_MS = 10.6
"""66 events in 0.7 seconds."""
FIRST_TOKEN = b"tok0 "

JSON = dict[str, Any]


def request_body(*, size: str = "small", pace_ms: float | None = None, asks_ids: bool = False) -> bytes:
    """Makes the body of a call; a stream if there is a pace."""
    marks = f"size:{size} pace:{pace_ms or 0:g} "
    body: JSON = {"model": "canned", "messages": [{"role": "user", "content": marks + "x" * 200}]}
    if asks_ids:
        body |= {"return_token_ids": True, "logprobs": True}
    if pace_ms is not None:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":")).encode()


def _logprob(token: str, number: int) -> JSON:
    logprob = -0.1234567 - number / 1000
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


def whole(size: str, *, ids: bool) -> bytes:
    """Returns a whole answer; the small one without ids has 581 bytes, the large one with ids about 37 kB."""
    prompt, completion = (
        (PROMPT_TOKENS, COMPLETION_TOKENS) if size == "rl" else (SMALL_PROMPT_TOKENS, SMALL_COMPLETION_TOKENS)
    )
    choice: JSON = {
        "index": 0,
        "message": {"role": "assistant", "content": " tok" * completion},
        "logprobs": None,
        "finish_reason": "stop",
    }
    answer: JSON = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "canned",
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    if ids:
        choice["logprobs"] = {"content": [_logprob(" token", i) for i in range(completion)]}
        choice["token_ids"] = [100_000 + i for i in range(completion)]
        answer["prompt_token_ids"] = [50_000 + i for i in range(prompt)]
    elif size == "small":
        missing = SMALL_BYTES - len(_encoded(answer))
        choice["message"]["content"] += "." * missing
    return _encoded(answer)


def events(*, ids: bool, usage: bool) -> list[bytes]:
    """Returns the events of a stream, whose tokens are numbered so that a client sees their order."""
    envelope: JSON = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "canned"}
    role: JSON = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    first = {**envelope, "choices": [role]}
    if ids:
        first["prompt_token_ids"] = [50_000 + i for i in range(PROMPT_TOKENS)]
    documents: list[JSON] = [first]
    for i in range(STREAM_TOKENS):
        token = f"tok{i} "
        choice: JSON = {"index": 0, "delta": {"content": token}, "logprobs": None, "finish_reason": None}
        if ids:
            choice |= {"logprobs": {"content": [_logprob(token, i)]}, "token_ids": [100_000 + i]}
        documents.append({**envelope, "choices": [choice]})
    documents.append({**envelope, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]})
    if usage:
        counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": STREAM_TOKENS}
        documents.append({**envelope, "choices": [], "usage": counts | {"total_tokens": sum(counts.values())}})
    return [b"data: " + _encoded(document, (",", ":")) + b"\n\n" for document in documents] + [b"data: [DONE]\n\n"]


def _encoded(document: JSON, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    return json.dumps(document, separators=separators).encode()
