"""Translates a Messages conversation to chat messages.

Intended changes: tool results are first in their turn, and their images after them, in the user's message; the texts of
an assistant's turn become one text before its tool calls; thinking is returned only to the backend that produced it;
cache marks are dropped.
"""

from __future__ import annotations

import msgspec

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import UNREADABLE, given, wrong
from fulmen_llm_proxy.translation.equivalents import INVALID_JSON, JSON
from fulmen_llm_proxy.translation.message_shapes import Block, Source, Turn
from fulmen_llm_proxy.translation.translator import UnsupportedFields

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning"})
"""Fields in which OpenAI-compatible servers return reasoning. The field's name becomes the signature of the thinking
block, so that the block can be returned in the same field. Other servers ignore signatures of Anthropic's models."""

TOOL_FAILED = "Error: "
"""Prefix of a failed tool's result, for which chat messages have no field."""

_REFERENCE = b"tool_reference"
_RESULT = msgspec.json.Decoder(str | list[Block])


class _InvalidInput(msgspec.Struct, forbid_unknown_fields=True):
    text: str = msgspec.field(name=INVALID_JSON)


_INVALID_INPUT = msgspec.json.Decoder(_InvalidInput)


def referred_tools(turns: list[Turn]) -> set[str]:
    """Returns the names of the tools to which results in the conversation refer, such as those of a search for tools."""
    blocks = [block for turn in turns for block in _blocks(turn.content) if block.type == "tool_result"]
    found = [item for block in blocks if _REFERENCE in bytes(block.content) for item in _read_result("messages", block)]
    return {item.tool_name for item in found if item.type == "tool_reference" and item.tool_name}


def chat_messages(system: str | list[Block] | None, turns: list[Turn], unsupported: UnsupportedFields) -> list[JSON]:
    """Returns the conversation as chat messages; adds violations to `unsupported`."""
    translation = _Conversation(unsupported)
    if system:
        translation.add_system("system", system)
    for index, turn in enumerate(turns):
        translation.add(f"messages[{index}]", turn)
    return translation.messages


class _Conversation:
    """The chat messages so far."""

    def __init__(self, unsupported: UnsupportedFields) -> None:
        self.messages: list[JSON] = []
        self._unsayable = unsupported

    def add(self, place: str, turn: Turn) -> None:
        match turn.role:
            case "user":
                self._add_user(place, _blocks(turn.content))
            case "assistant":
                self._add_assistant(place, _blocks(turn.content))
            case "system":
                self.add_system(place, turn.content)
            case _:
                self._unsayable.add(f"{place}.role (`{turn.role}`)")

    def add_system(self, place: str, content: str | list[Block]) -> None:
        parts = self._parts(place, _blocks(content))
        if parts:
            self.messages.append({"role": "system", "content": _content(parts)})

    def _add_user(self, place: str, blocks: list[Block]) -> None:
        parts: list[JSON] = []
        for index, block in enumerate(blocks):
            where = f"{place}.content[{index}]"
            if block.type == "tool_result":
                parts += self._add_result(where, block)
            else:
                parts += self._part(where, block)
        if parts:
            self.messages.append({"role": "user", "content": _content(parts)})

    def _add_result(self, place: str, block: Block) -> list[JSON]:
        """Adds a tool message; returns the images, which it cannot contain."""
        content = _read_result(place, block)
        parts = self._parts(f"{place}.content", content)
        texts = [part["text"] for part in parts if part["type"] == "text"]
        text = texts[0] if len(texts) == 1 else "\n".join(texts)
        if block.is_error and not text.startswith(TOOL_FAILED):
            text = TOOL_FAILED + text
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text})
        return [part for part in parts if part["type"] != "text"]

    def _add_assistant(self, place: str, blocks: list[Block]) -> None:
        texts: list[str] = []
        calls: list[JSON] = []
        message: JSON = {"role": "assistant", "content": None}
        for index, block in enumerate(blocks):
            match block.type:
                case "text":
                    texts.append(block.text or "")
                case "tool_use":
                    calls.append(_tool_call(block))
                case "thinking" if block.signature in REASONING_FIELDS:
                    message[block.signature] = message.get(block.signature, "") + (block.thinking or "")
                case "thinking" | "redacted_thinking":
                    continue
                case _:
                    self._unsayable.add(f"{place}.content[{index}] (a `{block.type}` block)")
        if calls:
            message["tool_calls"] = calls
        if texts or not calls:
            message["content"] = "".join(texts)
        self.messages.append(message)

    def _parts(self, place: str, blocks: list[Block]) -> list[JSON]:
        return [part for index, block in enumerate(blocks) for part in self._part(f"{place}[{index}]", block)]

    def _part(self, place: str, block: Block) -> list[JSON]:
        source = block.source if isinstance(block.source, Source) else Source()
        match block.type:
            case "text":
                return [_text(block.text or "")]
            case "tool_reference" if block.tool_name:
                return [_text(f"The tool {block.tool_name} can be called now.")]
            case "image":
                return self._image(place, source)
            case "document":
                return self._document(place, block, source)
            case "search_result":
                lines = [block.title or "", block.source if isinstance(block.source, str) else ""]
                found = [item.text or "" for item in _read_result(place, block)]
                return [_text("\n".join(line for line in [*lines, *found] if line))]
        self._unsayable.add(f"{place} (a `{block.type}` block)")
        return []

    def _image(self, place: str, source: Source) -> list[JSON]:
        if source.type == "base64" and source.data and source.media_type:
            return [_image_url(f"data:{source.media_type};base64,{source.data}")]
        if source.type == "url" and source.url:
            return [_image_url(source.url)]
        self._unsayable.add(f"{place} (an image whose source is `{source.type}`)")
        return []

    def _document(self, place: str, block: Block, source: Source) -> list[JSON]:
        heading = [_text(line) for line in (block.title, block.context) if line]
        if source.type == "text" and source.data is not None:
            return [*heading, _text(source.data)]
        if source.type == "content" and source.content is not None:
            within, blocks = f"{place}.source.content", _blocks(source.content)
            if any(inner.type == "document" for inner in blocks):
                self._unsayable.add(f"{within} (a document in a document)")
                return []
            return [*heading, *self._parts(within, blocks)]
        if source.type == "base64" and source.data and source.media_type:
            name = block.title or "document.pdf"
            file = {"filename": name, "file_data": f"data:{source.media_type};base64,{source.data}"}
            context = [_text(block.context)] if block.context else []
            return [*context, {"type": "file", "file": file}]
        self._unsayable.add(f"{place} (a document whose source is `{source.type}`)")
        return []


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _content(parts: list[JSON]) -> str | list[JSON]:
    """Returns a single text as a string, which every server understands."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text(text: str) -> JSON:
    return {"type": "text", "text": text}


def _image_url(url: str) -> JSON:
    return {"type": "image_url", "image_url": {"url": url}}


def _read_result(place: str, block: Block) -> list[Block]:
    if not given(block.content):
        return []
    try:
        return _blocks(_RESULT.decode(block.content))
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The field `{place}.content` is wrong: {wrong(error)}.") from None


def _tool_call(block: Block) -> JSON:
    function = {"name": block.name or "", "arguments": _arguments(block.input)}
    return {"id": block.id or "", "type": "function", "function": function}


def _arguments(given_input: msgspec.Raw) -> str:
    """Returns a tool's input as JSON text; malformed arguments as the model wrote them."""
    if not given(given_input):
        return "{}"
    text = bytes(given_input)
    if INVALID_JSON.encode() in text:
        try:
            return _INVALID_INPUT.decode(text).text
        except UNREADABLE:
            pass  # an ordinary input that happens to have this form
    return text.decode()
