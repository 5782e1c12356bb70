"""Translates a chat conversation to Messages turns.

Intended changes: system and developer messages become the system prompt, wherever they were; tool messages and the
user's next message become one turn, as do consecutive messages of a role; texts without a visible character, which
Messages rejects, are omitted, and a user who said nothing else says `SILENCE`; ids of tool calls are made unique and lose
characters that Messages does not allow.
"""

from __future__ import annotations

import msgspec

from fulmen_llm_proxy.apis.api import ABSENT, UNREADABLE, given
from fulmen_llm_proxy.translation.chat_shapes import ChatMessage, Part, ToolCall
from fulmen_llm_proxy.translation.equivalents import INVALID_JSON, JSON, tool_use_id
from fulmen_llm_proxy.translation.translator import UnsupportedFields

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PDF = "application/pdf"
_MARK = "cache_control"
_THOUGHTS = ("thinking", "redacted_thinking")

SILENCE = "."
"""What a user says in a turn without content: Messages rejects a conversation that does not begin with a user's turn, and
one that ends with an assistant's turn would be continued instead of answered."""


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
                self.system += _marked_at_end(self._blocks(place, message.content), message.cache_control)
            case "user":
                self._extend("user", self._blocks(place, message.content), message.cache_control)
            case "assistant":
                self._extend("assistant", self._assistant(place, message), message.cache_control)
            case "tool":
                self._extend("user", [self._result(place, message)], message.cache_control)
            case _:
                self._unsayable.add(f"{place}.role (`{message.role}`)")

    def end(self) -> None:
        """Completes the turns: the user's is first, none is empty, and the text that the assistant continues ends in a word."""
        if not self.turns and not self.system:
            return  # there was no message at all: the backend says so
        if not self.turns or self.turns[0]["role"] != "user":
            self.turns.insert(0, {"role": "user", "content": []})
        for turn in self.turns:
            turn["content"] = turn["content"] or [_text(SILENCE)]
        last = self.turns[-1]["content"][-1]
        if self.turns[-1]["role"] == "assistant" and last["type"] == "text":
            last["text"] = last["text"].rstrip()

    def _extend(self, role: str, blocks: list[JSON], mark: msgspec.Raw) -> None:
        blocks = _marked_at_end(blocks, mark)
        if self.turns and self.turns[-1]["role"] == role:
            self.turns[-1]["content"] += blocks
        elif blocks or role == "user":
            self.turns.append({"role": role, "content": blocks})

    def _assistant(self, place: str, message: ChatMessage) -> list[JSON]:
        blocks: list[JSON] = []
        for thought in message.thinking_blocks or ():
            if thought.type == "redacted_thinking" and thought.data:
                blocks.append({"type": "redacted_thinking", "data": thought.data})
            elif thought.signature:
                blocks.append({"type": "thinking", "thinking": thought.thinking or "", "signature": thought.signature})
        blocks += self._blocks(place, message.content)
        blocks += _texts(message.refusal)
        for index, call in enumerate(message.tool_calls or ()):
            blocks += self._tool_use(f"{place}.tool_calls[{index}]", call)
        return blocks

    def _tool_use(self, place: str, call: ToolCall) -> list[JSON]:
        if call.function is None or not call.function.name:
            self._unsayable.add(f"{place} (a call of type `{call.type}`)")
            return []
        self.tool_names[call.function.name] = None
        given_id, wanted = call.id or "", tool_use_id(call.id or "")
        unique, again = wanted, 1
        while unique in self._used:
            again += 1
            unique = f"{wanted}_{again}"
        self._used.add(unique)
        self._ids[given_id] = unique
        use: JSON = {"type": "tool_use", "id": unique, "name": call.function.name}
        return [_marked(use | {"input": _input(call.function.arguments)}, call.cache_control)]

    def _result(self, place: str, message: ChatMessage) -> JSON:
        call_id = message.tool_call_id or ""
        result: JSON = {"type": "tool_result", "tool_use_id": self._ids.get(call_id, tool_use_id(call_id))}
        if isinstance(message.content, str):  # as it is: only blocks of text need a visible character
            return result | ({"content": message.content} if message.content else {})
        blocks = self._blocks(place, message.content)
        if len(blocks) == 1 and blocks[0]["type"] == "text":
            [block] = blocks
            result["content"] = block["text"]
            return _marked(result, block.get(_MARK, ABSENT))
        return result | {"content": blocks} if blocks else result

    def _blocks(self, place: str, content: str | list[Part] | None) -> list[JSON]:
        if content is None:
            return []
        if isinstance(content, str):
            return _texts(content)
        return [
            _marked(block, part.cache_control)
            for i, part in enumerate(content)
            for block in self._block(f"{place}.content[{i}]", part)
        ]

    def _block(self, place: str, part: Part) -> list[JSON]:
        match part.type:
            case "text" | "refusal":
                return _texts(part.text or part.refusal)
            case "image_url" if part.image_url is not None:
                return self._image(place, part.image_url.url)
            case "file" if part.file is not None and part.file.file_data:
                return self._document(place, part.file.file_data, part.file.filename)
        self._unsayable.add(f"{place} (a part of type `{part.type}`)")
        return []

    def _image(self, place: str, url: str) -> list[JSON]:
        if not url.startswith("data:"):
            return [{"type": "image", "source": {"type": "url", "url": url}}]
        kind, data = _inline(url)
        if not data:
            self._unsayable.add(f"{place} (an image that is not in base64)")
            return []
        return [{"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}]

    def _document(self, place: str, file_data: str, filename: str | None) -> list[JSON]:
        kind, data = _inline(file_data)
        if kind != _PDF or not data:
            self._unsayable.add(f"{place} (a file that is not a PDF in base64)")
            return []
        block: JSON = {"type": "document", "source": {"type": "base64", "media_type": kind, "data": data}}
        return [block | {"title": filename} if filename else block]


def _text(text: str) -> JSON:
    return {"type": "text", "text": text}


def _texts(text: str | None) -> list[JSON]:
    """Returns a text as blocks: none without a visible character."""
    return [_text(text)] if text and not text.isspace() else []


def _marked(block: JSON, mark: msgspec.Raw) -> JSON:
    """Returns a block with a cache mark, if there is one."""
    return block | {_MARK: mark} if given(mark) else block


def _marked_at_end(blocks: list[JSON], mark: msgspec.Raw) -> list[JSON]:
    """Returns the blocks of a message with its cache mark on the last; thoughts cannot have one."""
    if blocks and blocks[-1]["type"] not in _THOUGHTS and _MARK not in blocks[-1]:
        return [*blocks[:-1], _marked(blocks[-1], mark)]
    return blocks


def _inline(url: str) -> tuple[str, str]:
    """Returns media type and base64 data of a `data:` URL; both empty for any other URL."""
    head, found, data = url.removeprefix("data:").partition(";base64,")
    return (head.partition(";")[0], data) if found else ("", "")


def _input(arguments: str | None) -> object:
    if not arguments or not arguments.strip():
        return {}
    try:
        return _OBJECT.decode(arguments)
    except (*UNREADABLE, UnicodeEncodeError):
        return {INVALID_JSON: arguments}
