"""Answers and streams of the fake OpenAI vendor: responses, which it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.responses import Response

from tests.support.llm_proxy.vendors import openai_shapes as shapes
from tests.support.llm_proxy.vendors.openai_chat import CREATED
from tests.support.llm_proxy.vendors.openai_turns import LOGPROB, pieces_of, turn_for

JSON = dict[str, Any]


class ResponseAnswer:
    """What one responses request is answered with."""

    def __init__(self, request: JSON, answer_id: str) -> None:
        self._request = request
        self._name = answer_id
        said = request.get("input", "")
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        last = items[-1]
        may_call = request.get("tools") and last.get("type") != "function_call_output"
        shape = (request.get("text") or {}).get("format") or {}
        self._turn = turn_for(
            last.get("output") or last.get("content"),
            tools=[tool["name"] for tool in request["tools"] if tool["type"] == "function"] if may_call else [],
            parallel=request.get("parallel_tool_calls") is not False,
            schema=shape["schema"] if shape.get("type") == "json_schema" else None,
            limit=request.get("max_output_tokens"),
        )
        self._input_tokens = 3 * len(items)
        self._cut = self._turn.finish_reason == "length"
        self._sequence = 0

    def whole(self) -> JSON:
        """Returns the whole answer."""
        status = "incomplete" if self._cut else "completed"
        return self._response(status, [self._item(index, status) for index in range(self._count())])

    def events(self) -> Iterator[JSON]:
        """Yields the events of the stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))
        for index in range(self._count()):
            yield from self._item_events(index)
        last = self.whole()
        yield self._event(f"response.{last['status']}", response=last)

    def _count(self) -> int:
        return len(self._turn.calls) or 1

    def _item_events(self, index: int) -> Iterator[JSON]:
        done = self._item(index, "incomplete" if self._cut else "completed")
        empty: JSON = {"arguments": ""} if self._turn.calls else {"content": []}
        yield self._event(
            "response.output_item.added", output_index=index, item={**done, **empty, "status": "in_progress"}
        )
        place = {"item_id": done["id"], "output_index": index}
        if self._turn.calls:
            arguments = done["arguments"]
            for piece in pieces_of(arguments):
                yield self._event("response.function_call_arguments.delta", **place, delta=piece)
            yield self._event("response.function_call_arguments.done", **place, arguments=arguments)
        else:
            yield from self._part_events(place, done["content"][0])
        yield self._event("response.output_item.done", output_index=index, item=done)

    def _part_events(self, place: JSON, part: JSON) -> Iterator[JSON]:
        place = {**place, "content_index": 0}
        field, kind = ("refusal", "refusal") if part["type"] == "refusal" else ("text", "output_text")
        extra: JSON = {"logprobs": []} if kind == "output_text" else {}
        empty = {**part, field: ""} | ({"logprobs": []} if "logprobs" in part else {})
        yield self._event("response.content_part.added", **place, part=empty)
        for piece in pieces_of(part[field]):
            yield self._event(f"response.{kind}.delta", **place, delta=piece, **extra)
        yield self._event(f"response.{kind}.done", **place, **{field: part[field]}, **extra)
        yield self._event("response.content_part.done", **place, part=part)

    def _event(self, kind: str, **fields: Any) -> JSON:
        document = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return shapes.response_event(document)

    def _item(self, index: int, status: str) -> JSON:
        turn = self._turn
        if turn.calls:
            name, arguments = turn.calls[index]
            call = {"type": "function_call", "id": f"fc_{self._name}_{index}", "call_id": f"call_{index}", "name": name}
            return {**call, "arguments": arguments, "status": status}
        part: JSON = {"type": "refusal", "refusal": turn.refusal}
        if turn.refusal is None:
            part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": self._logprobs()}
        message = {"type": "message", "id": f"msg_{self._name}", "role": "assistant", "status": status}
        return {**message, "content": [part]}

    def _logprobs(self) -> list[JSON]:
        if "message.output_text.logprobs" not in (self._request.get("include") or ()):
            return []
        return [
            {"token": token, "logprob": LOGPROB, "bytes": list(token.encode()), "top_logprobs": []}
            for token in pieces_of(self._turn.text or "")
        ]

    def _response(self, status: str, output: list[JSON]) -> JSON:
        request, generated = self._request, len(pieces_of(self._turn.spoken))
        usage = {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._input_tokens + generated,
        }
        return shapes.shaped(
            Response,
            {
                "id": f"resp_{self._name}",
                "object": "response",
                "created_at": CREATED,
                "status": status,
                "background": False,
                "error": None,
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "instructions": request.get("instructions"),
                "max_output_tokens": request.get("max_output_tokens"),
                "metadata": request.get("metadata") or {},
                "model": f"{request['model']}-2026-01-01",
                "output": output,
                "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
                "previous_response_id": request.get("previous_response_id"),
                "reasoning": {"effort": None, "summary": None},
                "store": request.get("store") is not False,
                "temperature": 1.0,
                "text": request.get("text") or {"format": {"type": "text"}},
                "tool_choice": "auto",
                "tools": request.get("tools") or [],
                "top_p": 1.0,
                "truncation": "disabled",
                "usage": None if status == "in_progress" else usage,
                "user": None,
                "vendor_extra": {"a": 1},
            },
        )
