"""Builds a Responses answer from the pieces of a chat completion.

Invariant: complete answers and streams take the same path, so the response at the end of a stream equals that of a
complete answer. Events are in the vendor's order and numbered without gaps; every added item is done before the
response ends, unless it failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fulmen_llm_proxy.apis.api import NULL, encode
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.apis.sse import encode_event
from fulmen_llm_proxy.translation.chat_pieces import Delta, ToolPiece, Usage
from fulmen_llm_proxy.translation.responses_tools import OwnTool, input_of

JSON = dict[str, object]

_ECHOED = {
    "instructions": NULL,
    "max_output_tokens": NULL,
    "max_tool_calls": NULL,
    "metadata": msgspec.Raw(b"{}"),
    "parallel_tool_calls": msgspec.Raw(b"true"),
    "prompt_cache_key": NULL,
    "reasoning": NULL,
    "safety_identifier": NULL,
    "temperature": NULL,
    "text": msgspec.Raw(b'{"format":{"type":"text"}}'),
    "tool_choice": msgspec.Raw(b'"auto"'),
    "tools": msgspec.Raw(b"[]"),
    "top_logprobs": NULL,
    "top_p": NULL,
    "truncation": msgspec.Raw(b'"disabled"'),
    "user": NULL,
}
"""Fields of the request that the answer repeats, with their defaults."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXT_EVENTS = {
    "output_text": "response.output_text",
    "refusal": "response.refusal",
    "reasoning_text": "response.reasoning_text",
}


@dataclass(slots=True, kw_only=True)
class _Part:
    """A growing part of an item."""

    type: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    annotations: list[JSON] = field(default_factory=list)

    def value(self) -> JSON:
        text = "".join(self.pieces)
        match self.type:
            case "output_text":
                return {"type": "output_text", "text": text, "annotations": self.annotations, "logprobs": self.logprobs}
            case "refusal":
                return {"type": "refusal", "refusal": text}
            case _:
                return {"type": "reasoning_text", "text": text}


@dataclass(slots=True, kw_only=True)
class _Growing:
    """A growing output item."""

    index: int
    item: JSON
    parts: list[JSON] = field(default_factory=list)
    part: _Part | None = None
    arguments: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.item["id"])

    @property
    def is_custom(self) -> bool:
        return self.item["type"] == "custom_tool_call"


class ResponseBuilder:
    """Builds one answer; `drain` returns its events."""

    def __init__(self, request: Fields, tools: Mapping[str, OwnTool], *, streaming: bool) -> None:
        """Sets the caller's request, parts of which the answer repeats, and its tools by the functions they became."""
        self._request = request
        self._tools = tools
        self._streaming = streaming
        self._events: list[bytes] = []
        self._sequence = 0
        self._head: JSON = {}
        self._name = ""
        self._output: list[JSON] = []
        self._item: _Growing | None = None
        self._calls: dict[int, _Growing] = {}
        self.over = False

    @property
    def started(self) -> bool:
        """Whether the answer has an id."""
        return bool(self._head)

    def drain(self) -> list[bytes]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def start(self, *, answer_id: str, created: float, model: str) -> None:
        """Starts the answer."""
        self._name = answer_id.removeprefix("chatcmpl-").replace("-", "") or "0"
        self._head = {"id": f"resp_{self._name}", "object": "response", "created_at": int(created), "model": model}
        if self._streaming:
            begun = self._response("in_progress")
            self._emit("response.created", response=begun)
            self._emit("response.in_progress", response=begun)

    def add(self, delta: Delta, logprobs: Sequence[msgspec.Raw] = ()) -> None:
        """Adds a piece of the message, or all of it, with the log-probabilities of its text."""
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            self._add_text("reasoning", "reasoning_text", thought, ())
        if delta.content or logprobs:
            self._add_text("message", "output_text", delta.content or "", logprobs)
        if delta.refusal:
            self._add_text("message", "refusal", delta.refusal, ())
        for annotation in delta.annotations or ():
            self._annotate(annotation)
        for position, piece in enumerate(delta.tool_calls or ()):
            self._add_call(piece, position if piece.index is None else piece.index)

    def finish(self, finish_reason: str | None, usage: Usage | None, service_tier: str | None) -> JSON:
        """Ends the answer and returns it."""
        reason = _INCOMPLETE.get(finish_reason or "")
        if not self._output:
            self._add_text("message", "output_text", "", ())
        status = "completed" if reason is None else "incomplete"
        self._close(status)
        response = self._response(status, usage)
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if service_tier is not None:
            response["service_tier"] = service_tier
        self._emit(f"response.{status}", response=response)
        self.over = True
        return response

    def fail(self, code: str, message: str) -> None:
        """Ends the answer with an error; the text so far stays in it."""
        if not self.started:
            self.start(answer_id="", created=0, model="")
        self._close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": code, "message": message}
        self._emit("response.failed", response=response)
        self.over = True

    def _response(self, status: str, usage: Usage | None = None) -> JSON:
        repeated = {name: self._request.get(name, default) for name, default in _ECHOED.items()}
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "previous_response_id": None,
            **{name: _ECHOED[name] if bytes(raw) == b"null" else raw for name, raw in repeated.items()},
            "service_tier": self._request.get("service_tier", NULL),
            "store": False,
            "usage": None if usage is None else usage.as_responses(),
        }

    def _add_text(self, item_type: str, part_type: str, text: str, logprobs: Sequence[msgspec.Raw]) -> None:
        growing = self._item
        if growing is None or growing.item["type"] != item_type:
            self._close_item("completed")
            growing = self._item = self._open(item_type)
        part = growing.part
        if part is None or part.type != part_type:
            self._close_part(growing)
            part = growing.part = _Part(type=part_type, index=len(growing.parts))
            self._emit("response.content_part.added", **self._at(growing, part), part=part.value())
        if text or logprobs:
            part.pieces.append(text)
            part.logprobs += logprobs
            extra = {"logprobs": list(logprobs)} if part_type == "output_text" else {}
            self._emit(f"{_TEXT_EVENTS[part_type]}.delta", **self._at(growing, part), delta=text, **extra)

    def _annotate(self, annotation: JSON) -> None:
        growing = self._item
        if growing is None or growing.part is None or growing.part.type != "output_text":
            return
        kind = str(annotation.get("type"))
        inner = annotation.get(kind)
        fields = {"type": kind, **inner} if isinstance(inner, dict) else annotation
        position = len(growing.part.annotations)
        growing.part.annotations.append(fields)
        self._emit(
            "response.output_text.annotation.added",
            **self._at(growing, growing.part),
            annotation_index=position,
            annotation=fields,
        )

    def _add_call(self, piece: ToolPiece, index: int) -> None:
        self._close_item("completed")
        growing = self._calls.get(index)
        function = piece.function
        if growing is None:
            call_id = piece.id or f"call_{self._name}_{index}"
            growing = self._calls[index] = self._open_call(call_id, "" if function is None else function.name or "")
        if function is not None and function.name and not growing.item["name"]:
            growing.item["name"] = function.name
        if function is not None and function.arguments:
            growing.arguments.append(function.arguments)
            if growing.is_custom:
                return  # its input is known when the arguments are complete
            self._emit(
                "response.function_call_arguments.delta",
                item_id=growing.id,
                output_index=growing.index,
                delta=function.arguments,
            )

    def _open_call(self, call_id: str, name: str) -> _Growing:
        own = self._tools.get(name) or OwnTool(name)
        space = {} if own.namespace is None else {"namespace": own.namespace}
        if own.custom:
            return self._open("custom_tool_call", call_id=call_id, name=own.name, **space, input="")
        return self._open("function_call", call_id=call_id, name=own.name, **space, arguments="")

    def _open(self, item_type: str, **fields: object) -> _Growing:
        index = len(self._output)
        prefix = _PREFIXES[item_type]
        item: JSON = {"id": f"{prefix}_{self._name}_{index}", "type": item_type, "status": "in_progress", **fields}
        if item_type == "message":
            item |= {"role": "assistant", "content": []}
        elif item_type == "reasoning":
            item |= {"summary": [], "content": []}
        self._output.append(item)
        self._emit("response.output_item.added", output_index=index, item=item)
        return _Growing(index=index, item=item)

    def _close(self, status: str) -> None:
        self._close_item(status)
        # Only now: until then the backend may continue any of several calls.
        for growing in self._calls.values():
            self._close_call(growing, status)

    def _close_item(self, status: str) -> None:
        growing, self._item = self._item, None
        if growing is None:
            return
        self._close_part(growing)
        growing.item["content"] = growing.parts
        growing.item["status"] = status
        self._emit("response.output_item.done", output_index=growing.index, item=growing.item)

    def _close_part(self, growing: _Growing) -> None:
        part, growing.part = growing.part, None
        if part is None:
            return
        value = part.value()
        fields = {"refusal": value["refusal"]} if part.type == "refusal" else {"text": value["text"]}
        extra = {"logprobs": part.logprobs} if part.type == "output_text" else {}
        self._emit(f"{_TEXT_EVENTS[part.type]}.done", **self._at(growing, part), **fields, **extra)
        self._emit("response.content_part.done", **self._at(growing, part), part=value)
        growing.parts.append(value)

    def _close_call(self, growing: _Growing, status: str) -> None:
        arguments = "".join(growing.arguments)
        place: JSON = {"item_id": growing.id, "output_index": growing.index}
        if growing.is_custom:
            given = input_of(arguments)
            growing.item |= {"input": given, "status": status}
            self._emit("response.custom_tool_call_input.delta", **place, delta=given)
            self._emit("response.custom_tool_call_input.done", **place, input=given)
        else:
            growing.item |= {"arguments": arguments, "status": status}
            name = growing.item["name"]
            self._emit("response.function_call_arguments.done", **place, name=name, arguments=arguments)
        self._emit("response.output_item.done", output_index=growing.index, item=growing.item)

    def _at(self, growing: _Growing, part: _Part) -> JSON:
        return {"item_id": growing.id, "output_index": growing.index, "content_index": part.index}

    def _emit(self, event: str, **fields: object) -> None:
        if not self._streaming:
            return
        document = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        self._events.append(encode_event(encode(document), event.encode()))
