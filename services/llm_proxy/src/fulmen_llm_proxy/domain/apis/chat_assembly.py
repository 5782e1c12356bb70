"""Puts the events of a stream back together as the answer that they amount to."""

from __future__ import annotations

from typing import Any, cast

import msgspec

JSON = dict[str, Any]  # Any: the events are the backend's own, of any depth

_DECODE = msgspec.json.Decoder(JSON).decode
_ENCODE = msgspec.json.Encoder().encode
_SAID_ONCE = frozenset({"role", "id", "type", "index"})
"""Fields of a delta that are whole in each event; all other strings are pieces."""


def assemble_answer(payloads: list[bytes]) -> bytes:
    """Returns the `chat.completion` object that the events of a stream amount to, as JSON.

    Events that are not JSON objects are left out: the call is marked malformed by then.
    """
    answer: JSON = {}
    choices: dict[int, JSON] = {}
    for payload in payloads:
        try:
            event = _DECODE(payload)
        except msgspec.DecodeError:
            continue
        for chunk in event.pop("choices", None) or ():
            _add_chunk(choices.setdefault(chunk.get("index", 0), {}), chunk)
        answer.update({key: value for key, value in event.items() if value is not None})
    answer["object"] = "chat.completion"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return _ENCODE(answer)


def _add_chunk(choice: JSON, chunk: JSON) -> None:
    message = choice.setdefault("message", {})
    for key, value in chunk.items():
        if key == "delta":
            _add_delta(message, value or {})
        elif key == "logprobs" and value is not None:
            choice["logprobs"] = choice.get("logprobs") or {}
            _add_delta(choice["logprobs"], value)
        elif value is not None or key not in choice:
            choice[key] = value


def _add_delta(whole: JSON, delta: JSON) -> None:
    for key, piece in delta.items():
        held = whole.get(key)
        match piece:
            case None:
                whole.setdefault(key, None)
            case str() if isinstance(held, str):
                whole[key] = held if key in _SAID_ONCE and held else held + piece
            case dict() if isinstance(held, dict):
                _add_delta(cast("JSON", held), piece)
            case list() if isinstance(held, list):
                _add_items(held, piece)
            case list():
                whole[key] = _add_items([], piece)
            case _:
                whole[key] = piece


def _add_items(held: list[Any], pieces: list[Any]) -> list[Any]:
    """Extends a list; items with an index, such as tool calls, are pieces of the item there."""
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        found = next((h for h in held if isinstance(h, dict) and h.get("index") == index), None)
        if index is None or found is None:
            held.append(piece)
        else:
            _add_delta(found, piece)
    return held
