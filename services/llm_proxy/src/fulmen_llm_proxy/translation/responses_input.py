"""Translates the input items of a Responses request to chat messages.

An assistant turn (its reasoning, text and function calls) is several items but one message, so consecutive items are
joined.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.translation.responses_tools import arguments_of, function_name
from fulmen_llm_proxy.translation.translator import UnsupportedFields

JSON = dict[str, object]

_ROLES = frozenset({"user", "assistant", "system", "developer"})


class ContentPart(msgspec.Struct):
    """A content part of a message or of a function's output, of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    input_audio: dict[str, msgspec.Raw] | None = None


class Item(msgspec.Struct):
    """An input item of any type; messages may omit their type."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None


class MessageWriter:
    """Writes the messages of a request, and collects items that chat completions cannot express."""

    def __init__(self, unsupported: UnsupportedFields) -> None:
        """Sets the collector of what chat completions cannot express."""
        self.messages: list[JSON] = []
        self._unsupported = unsupported
        self._turn: JSON | None = None
        """The assistant's message to which further items may belong."""

    def add(self, item: Item, place: str) -> None:
        """Adds an item."""
        kind = item.type or ("message" if item.role else "")
        match kind:
            case "message":
                self._add_message(item, place)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call" | "custom_tool_call":
                self._add_call(item, place)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, place)
            case _:
                self._unsupported.add(f"{place} of type '{kind}'")

    def _add_message(self, item: Item, place: str) -> None:
        role = item.role or "user"
        if role not in _ROLES:
            self._unsupported.add(f"{place} of role '{role}'")
        elif role == "assistant":
            self._add_said(item, place)
        else:
            self._turn = None
            # Only OpenAI's models know the developer role, and they treat system messages in the same way.
            name = "system" if role == "developer" else role
            self.messages.append({"role": name, "content": self._content(item.content, f"{place}.content")})

    def _add_said(self, item: Item, place: str) -> None:
        turn = self._assistant(fresh_if=("content", "refusal", "tool_calls"))
        if isinstance(item.content, str):
            turn["content"] = item.content
            return
        parts = item.content or []
        texts = [part.text or "" for part in parts if part.type in ("output_text", "input_text")]
        refusals = [part.refusal or "" for part in parts if part.type == "refusal"]
        for index, part in enumerate(parts):
            if part.type not in ("output_text", "input_text", "refusal"):
                self._unsupported.add(f"{place}.content[{index}] of type '{part.type}'")
        if texts or not refusals:
            turn["content"] = "".join(texts)
        if refusals:
            turn["refusal"] = "".join(refusals)

    def _add_reasoning(self, item: Item) -> None:
        """Keeps reasoning in plain text; only the vendor can read encrypted reasoning."""
        if not isinstance(item.content, list):
            return
        text = "".join(part.text or "" for part in item.content if part.type == "reasoning_text")
        if text:
            turn = self._assistant(fresh_if=("reasoning_content", "content", "refusal", "tool_calls"))
            turn["reasoning_content"] = text

    def _add_call(self, item: Item, place: str) -> None:
        if item.call_id is None or item.name is None:
            self._unsupported.add(f"{place} without `call_id` and `name`")
            return
        calls = self._assistant(fresh_if=()).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        arguments = item.arguments or "" if item.type == "function_call" else arguments_of(item.input or "")
        function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def _add_output(self, item: Item, place: str) -> None:
        self._turn = None
        if item.call_id is None:
            self._unsupported.add(f"{place} without `call_id`")
            return
        content = self._content(item.output, f"{place}.output")
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _assistant(self, *, fresh_if: tuple[str, ...]) -> JSON:
        """Returns the assistant's current message; a new one if that already has one of these fields."""
        turn = self._turn
        if turn is None or any(key in turn for key in fresh_if):
            turn = self._turn = {"role": "assistant"}
            self.messages.append(turn)
        return turn

    def _content(self, content: str | list[ContentPart] | None, place: str) -> str | list[JSON]:
        if content is None or isinstance(content, str):
            return content or ""
        if len(content) == 1 and content[0].type in ("input_text", "output_text"):
            return content[0].text or ""
        said = [self._part(part, f"{place}[{index}]") for index, part in enumerate(content)]
        return [part for part in said if part is not None]

    def _part(self, part: ContentPart, place: str) -> JSON | None:
        match part:
            case ContentPart(type="input_text" | "output_text" | "text"):
                return {"type": "text", "text": part.text or ""}
            case ContentPart(type="input_image", image_url=str(url)):
                detail = {} if part.detail is None else {"detail": part.detail}
                return {"type": "image_url", "image_url": {"url": url, **detail}}
            case ContentPart(type="input_file", file_url=None) if part.file_data or part.file_id:
                fields = {"file_data": part.file_data, "file_id": part.file_id, "filename": part.filename}
                return {"type": "file", "file": {key: value for key, value in fields.items() if value is not None}}
            case ContentPart(type="input_audio", input_audio=dict()):
                return {"type": "input_audio", "input_audio": part.input_audio}
            case ContentPart(type="input_image"):
                self._unsupported.add(f"{place}: an image by `file_id`")
            case ContentPart(type="input_file"):
                self._unsupported.add(f"{place}: a file by `file_url`")
            case _:
                self._unsupported.add(f"{place} of type '{part.type}'")
        return None
