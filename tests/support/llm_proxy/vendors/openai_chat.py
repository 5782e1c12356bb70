"""Answers and streams of the fake OpenAI vendor: chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.llm_proxy.vendors import openai_shapes as shapes
from tests.support.llm_proxy.vendors.openai_turns import LOGPROB, Turn, pieces_of, turn_for

JSON = dict[str, Any]
CREATED = 1_780_000_000


def usage_of(prompt: int, completion: int) -> JSON:
    """Returns the usage with all of its details."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0, "cache_write_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class ChatAnswer:
    """What one chat completions request is answered with."""

    def __init__(self, request: JSON, answer_id: str) -> None:
        messages = request["messages"]
        may_call = request.get("tools") and messages[-1]["role"] != "tool" and request.get("tool_choice") != "none"
        shape = request.get("response_format") or {}
        self._request = request
        self._head = {
            "id": f"chatcmpl-{answer_id}",
            "created": CREATED,
            "model": f"{request['model']}-2026-01-01",
            "service_tier": "default",
            "system_fingerprint": "fp_tests",
        }
        self._turn = turn_for(
            messages[-1].get("content"),
            tools=[tool["function"]["name"] for tool in request["tools"]] if may_call else [],
            parallel=request.get("parallel_tool_calls") is not False,
            schema=shape["json_schema"]["schema"] if shape.get("type") == "json_schema" else None,
            limit=request.get("max_completion_tokens") or request.get("max_tokens"),
        )
        self._count = request.get("n") or 1
        generated = len(pieces_of(self._turn.spoken)) * self._count
        self._usage = usage_of(3 * len(messages), generated)

    def whole(self) -> JSON:
        """Returns the whole answer."""
        choices = [
            {
                "index": index,
                "message": self._message(),
                "logprobs": self._logprobs(pieces_of(self._turn.text or "")),
                "finish_reason": self._turn.finish_reason,
            }
            for index in range(self._count)
        ]
        return shapes.shaped(
            ChatCompletion,
            {
                **self._head,
                "object": "chat.completion",
                "choices": choices,
                "usage": self._usage,
                "vendor_extra": {"a": 1},
            },
        )

    def events(self) -> Iterator[JSON]:
        """Yields the events of the stream, without its `[DONE]`."""
        wants_usage = (self._request.get("stream_options") or {}).get("include_usage")
        absent = {"usage": None} if wants_usage else {}
        for index in range(self._count):
            for delta, logprobs in self._deltas():
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
                yield self._chunk(choices=[choice], **absent)
            last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": self._turn.finish_reason}
            yield self._chunk(choices=[last], **absent)
        if wants_usage:
            yield self._chunk(choices=[], usage=self._usage)

    def _chunk(self, **fields: Any) -> JSON:
        return shapes.shaped(ChatCompletionChunk, {**self._head, "object": "chat.completion.chunk", **fields})

    def _message(self) -> JSON:
        turn = self._turn
        message: JSON = {"role": "assistant", "content": turn.text, "refusal": turn.refusal, "annotations": []}
        if turn.calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(turn.calls)
            ]
        return message

    def _deltas(self) -> Iterator[tuple[JSON, JSON | None]]:
        turn = self._turn
        yield {"role": "assistant", "content": None if turn.calls else "", "refusal": None}, None
        for piece in pieces_of(turn.text or ""):
            yield {"content": piece}, self._logprobs([piece])
        for piece in pieces_of(turn.refusal or ""):
            yield {"refusal": piece}, None
        for number, (name, arguments) in enumerate(turn.calls):
            head = {
                "index": number,
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            yield {"tool_calls": [head]}, None
            for piece in pieces_of(arguments):
                yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}, None

    def _logprobs(self, tokens: list[str]) -> JSON | None:
        if not self._request.get("logprobs"):
            return None
        top = self._request.get("top_logprobs") or 0
        entries = []
        for token in tokens:
            entry = {"token": token, "logprob": LOGPROB, "bytes": list(token.encode())}
            entries.append({**entry, "top_logprobs": [dict(entry) for _ in range(top)]})
        return {"content": entries, "refusal": None}


class TextAnswer:
    """What one completions request is answered with."""

    def __init__(self, request: JSON, answer_id: str) -> None:
        prompt = request["prompt"]
        self._prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [str(prompt)]
        self._request = request
        self._head = {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": CREATED,
            "model": request["model"],
        }
        self._turns = [
            turn_for(text, tools=[], parallel=True, schema=None, limit=request.get("max_tokens") or 16)
            for text in self._prompts
            for _ in range(request.get("n") or 1)
        ]
        generated = sum(len(pieces_of(turn.spoken)) for turn in self._turns)
        self._usage = usage_of(3 * len(self._prompts), generated)

    def whole(self) -> JSON:
        """Returns the whole answer."""
        choices = [
            {**self._piece(index, turn, pieces_of(turn.spoken)), "finish_reason": turn.finish_reason}
            for index, turn in enumerate(self._turns)
        ]
        return shapes.shaped(Completion, {**self._head, "choices": choices, "usage": self._usage})

    def events(self) -> Iterator[JSON]:
        """Yields the events of the stream, without its `[DONE]`. The package's type knows no unfinished choice."""
        for index, turn in enumerate(self._turns):
            for piece in pieces_of(turn.spoken):
                yield {**self._head, "choices": [{**self._piece(index, turn, [piece]), "finish_reason": None}]}
            yield shapes.shaped(
                Completion,
                {**self._head, "choices": [{**self._piece(index, turn, []), "finish_reason": turn.finish_reason}]},
            )
        if (self._request.get("stream_options") or {}).get("include_usage"):
            yield shapes.shaped(Completion, {**self._head, "choices": [], "usage": self._usage})

    def _piece(self, index: int, turn: Turn, tokens: list[str]) -> JSON:
        logprobs = None
        if self._request.get("logprobs") is not None:
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [LOGPROB] * len(tokens),
                "text_offset": [0] * len(tokens),
                "top_logprobs": None,
            }
        return {"index": index, "text": "".join(tokens), "logprobs": logprobs}
