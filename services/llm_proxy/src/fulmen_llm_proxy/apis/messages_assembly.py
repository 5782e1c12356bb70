"""Puts the events of a Messages stream back together as the message that they amount to."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = dict[str, Any]  # Any: the events are the backend's own, of any depth

_DECODE = msgspec.json.Decoder(JSON).decode
_ENCODE = msgspec.json.Encoder().encode
_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The field of each kind of delta that holds a piece of a string."""


def assemble_message(payloads: list[bytes]) -> bytes:
    """Returns the message that the events of a stream amount to, as JSON.

    Events that are not JSON objects are left out: the call is marked malformed by then.
    """
    message: JSON = {}
    blocks: dict[int, JSON] = {}
    for payload in payloads:
        try:
            event = _DECODE(payload)
        except msgspec.DecodeError:
            continue
        _add(message, blocks, event)
    if message:
        message["content"] = [_finished(blocks[index]) for index in sorted(blocks)]
    return _ENCODE(message)


def _add(message: JSON, blocks: dict[int, JSON], event: JSON) -> None:
    match event:
        case {"type": "message_start", "message": dict(start)}:
            message |= start
        case {"type": "content_block_start", "index": int(index), "content_block": dict(block)}:
            blocks[index] = block
        case {"type": "content_block_delta", "index": int(index), "delta": dict(delta)} if index in blocks:
            _add_delta(blocks[index], delta)
        case {"type": "message_delta"}:
            _add_end(message, event)


def _add_delta(block: JSON, delta: JSON) -> None:
    kind = delta.get("type")
    field = _PIECES.get(kind or "")
    if field is not None:
        block[field] = (block.get(field) or "") + (delta.get(field) or "")
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]


def _add_end(message: JSON, event: JSON) -> None:
    message |= event.get("delta") or {}
    told = {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
    message["usage"] = {**(message.get("usage") or {}), **told}
    message |= {key: value for key, value in event.items() if key not in ("type", "delta", "usage")}


def _finished(block: JSON) -> JSON:
    """Puts the pieces of a tool's input together; what is not JSON stays text."""
    pieces = block.pop("partial_json", "")
    if pieces:
        try:
            block["input"] = msgspec.json.decode(pieces)
        except msgspec.DecodeError:
            block["input"] = pieces
    return block
