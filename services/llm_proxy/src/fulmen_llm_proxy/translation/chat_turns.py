"""Translates a chat conversation to Messages turns.

Intended changes: system and developer messages become the system prompt, wherever they were; tool messages and the
user's next message become one turn, as do consecutive messages of a role; empty texts, which Messages rejects, are
omitted; ids of tool calls are made unique and lose characters that Messages does not allow.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fulmen_llm_proxy.translation.chat_shapes import ChatMessage, Part, ToolCall
from fulmen_llm_proxy.translation.equivalents import INVALID_JSON, JSON, tool_use_id
from fulmen_llm_proxy.translation.translator import UnsupportedFields

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_PDF = "application/pdf"


class Conversation:
    """The translated turns.

    Attributes:
        system: blocks of the system prompt.
        turns: alternating turns of user and assistant.
        tool_names: names of the called tools, in order.
    """

    def __init__(self, unsupported: UnsupportedFields) -> None:
        """Sets the collector of fields that Messages cannot express."""
        self.system: list[JSON] = []
        self.turns: list[JSON] = []
        self.tool_names: dict[str, None] = {}
        self._unsayable = unsupported
        self._ids: dict[str, str] = {}
        self._used: set[str] = set()

    def add(self, place: str, message: ChatMessage) -> None:
        """Adds one chat message."""
        match message.role:
            case "system" | "developer":
                self.system += self._blocks(place, message.content)
            case "user":
                self._extend("user", self._blocks(place, message.content))
            case "assistant":
                self._extend("assistant", self._assistant(place, message))
            case "tool":
                self._extend("user", [self._result(place, message)])
            case _:
                self._unsayable.add(f"{place}.role", f"`{message.role}`")

    def _extend(self, role: str, blocks: list[JSON]) -> None:
        if not blocks:
            return
        if self.turns and self.turns[-1]["role"] == role:
            self.turns[-1]["content"] += blocks
        else:
            self.turns.append({"role": role, "content": blocks})

    def _assistant(self, place: str, message: ChatMessage) -> list[JSON]:
        blocks: list[JSON] = []
        for thought in message.thinking_blocks or ():
            if thought.type == "redacted_thinking" and thought.data:
                blocks.append({"type": "redacted_thinking", "data": thought.data})
            elif thought.signature:
                blocks.append({"type": "thinking", "thinking": thought.thinking or "", "signature": thought.signature})
        blocks += self._blocks(place, message.content)
        if message.refusal:
            blocks.append({"type": "text", "text": message.refusal})
        for index, call in enumerate(message.tool_calls or ()):
            blocks += self._tool_use(f"{place}.tool_calls[{index}]", call)
        return blocks

    def _tool_use(self, place: str, call: ToolCall) -> list[JSON]:
        if call.function is None or not call.function.name:
            self._unsayable.add(place, f"a call of type `{call.type}`")
            return []
        self.tool_names[call.function.name] = None
        given_id, wanted = call.id or "", tool_use_id(call.id or "")
        unique, again = wanted, 1
        while unique in self._used:
            again += 1
            unique = f"{wanted}_{again}"
        self._used.add(unique)
        self._ids[given_id] = unique
        return [
            {"type": "tool_use", "id": unique, "name": call.function.name, "input": _input(call.function.arguments)}
        ]

    def _result(self, place: str, message: ChatMessage) -> JSON:
        call_id = message.tool_call_id or ""
        blocks = self._blocks(place, message.content)
        result: JSON = {"type": "tool_result", "tool_use_id": self._ids.get(call_id, tool_use_id(call_id))}
        if blocks:
            single = len(blocks) == 1 and blocks[0]["type"] == "text"
            result["content"] = blocks[0]["text"] if single else blocks
        return result

    def _blocks(self, place: str, content: str | list[Part] | None) -> list[JSON]:
        if content is None:
            return []
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        return [block for i, part in enumerate(content) for block in self._block(f"{place}.content[{i}]", part)]

    def _block(self, place: str, part: Part) -> list[JSON]:
        match part.type:
            case "text" | "refusal":
                text = part.text or part.refusal
                return [{"type": "text", "text": text}] if text else []
            case "image_url" if part.image_url is not None:
                return self._image(place, part.image_url.url)
            case "file" if part.file is not None and part.file.file_data:
                return self._document(place, part.file.file_data, part.file.filename)
        self._unsayable.add(place, f"a part of type `{part.type}`")
        return []

    def _image(self, place: str, url: str) -> list[JSON]:
        if not url.startswith("data:"):
            return [{"type": "image", "source": {"type": "url", "url": url}}]
        kind, data = _inline(url)
        if not data:
            self._unsayable.add(place, "an image that is not in base64")
            return []
        return [{"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}]

    def _document(self, place: str, file_data: str, filename: str | None) -> list[JSON]:
        kind, data = _inline(file_data)
        if kind != _PDF or not data:
            self._unsayable.add(place, "a file that is not a PDF in base64")
            return []
        block: JSON = {"type": "document", "source": {"type": "base64", "media_type": kind, "data": data}}
        return [block | {"title": filename} if filename else block]


def _inline(url: str) -> tuple[str, str]:
    """Returns media type and base64 data of a `data:` URL; both empty for any other URL."""
    head, found, data = url.removeprefix("data:").partition(";base64,")
    return (head.partition(";")[0], data) if found else ("", "")


def _input(arguments: str | None) -> object:
    if not arguments or not arguments.strip():
        return {}
    try:
        return _OBJECT.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return {INVALID_JSON: arguments}
