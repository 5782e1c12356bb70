"""Assembles the events of a stream to the complete answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from fulmen_llm_proxy.apis.assembly import JSON, assembled

_ENCODE = msgspec.json.Encoder().encode
_SAID_ONCE = frozenset({"role", "id", "type", "index"})
"""Fields of a delta that are complete in each event; all other strings are pieces."""
_OPEN_ITEMS = 256
"""Last items of a list that a piece may extend: a search of all would cost the square of what a backend sends."""


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    role: str | None = None
    content: str | None = None
    refusal: None = None


class _PlainChoice(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    index: int
    delta: _PlainDelta
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None
    token_ids: None = None


class _PlainEvent(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An event with text only, as nearly all are."""

    id: str
    object: str
    created: int
    model: str
    choices: list[_PlainChoice]
    system_fingerprint: str | None = None
    service_tier: str | None = None
    usage: None = None
    prompt_token_ids: None = None


_HEAD, _TAIL = 1, 3
"""The first event has the role, the last ones the finish reason and usage."""
_WORTH_MERGING = _HEAD + _TAIL + 4
_PLAIN = msgspec.json.Decoder(list[_PlainEvent]).decode


class _Chunk(msgspec.Struct):
    index: int = 0
    message: JSON | None = None
    delta: JSON | None = None
    logprobs: JSON | None = None


class ChatEvent(msgspec.Struct):
    """The parts of an event that are added up."""

    choices: list[_Chunk] | None = None


def assemble_answer(payloads: list[bytes]) -> bytes:
    """Assembles the `chat.completion` object of a stream, as JSON."""
    return assemble(merged(payloads), ChatEvent, "chat.completion", add_chunk)


def merged(payloads: list[bytes]) -> list[bytes]:
    """Merges the plain events of one choice into one event, at a tenth of the cost of adding them up."""
    if len(payloads) < _WORTH_MERGING:
        return payloads
    head, tail = payloads[:_HEAD], payloads[-_TAIL:]
    try:
        plain = _PLAIN(b"[%s]" % b",".join(payloads[_HEAD:-_TAIL]))
    except ValueError:
        return payloads
    first = plain[0]
    if not all(_continues(first, event) for event in plain):
        return payloads
    text = "".join([event.choices[0].delta.content or "" for event in plain])
    first.choices[0].delta.content = text
    return [*head, _ENCODE(first), *tail]


def _continues(first: _PlainEvent, event: _PlainEvent) -> bool:
    """Returns whether an event adds text to the same choice, and nothing else."""
    if len(event.choices) != 1 or (event.id, event.model, event.system_fingerprint, event.service_tier) != (
        first.id,
        first.model,
        first.system_fingerprint,
        first.service_tier,
    ):
        return False
    choice = event.choices[0]
    return choice.index == first.choices[0].index and choice.delta.role is None and choice.delta.content is not None


def assemble(payloads: list[bytes], shape: type, kind: str, add: Callable[[JSON, JSON], None]) -> bytes:
    """Assembles the answer of a stream, as JSON; see `assembled`.

    Args:
        shape: types of the parts of an event.
        kind: its `object`.
        add: adds a choice of an event to the assembled choice.
    """

    def build(events: Iterator[JSON]) -> JSON:
        answer: JSON = {}
        choices: dict[int, JSON] = {}
        for event in events:
            for chunk in event.pop("choices", None) or ():
                add(choices.setdefault(chunk.get("index", 0), {}), chunk)
            answer.update({key: value for key, value in event.items() if value is not None})
        return answer | {"object": kind, "choices": [choices[index] for index in sorted(choices)]}

    return assembled(payloads, shape, build)


def add_chunk(choice: JSON, chunk: JSON) -> None:
    """Adds a choice of an event to the assembled choice."""
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
    """Extends a list; an item with an index, such as a tool call, extends the item with that index."""
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        found = None
        if index is not None:
            found = next((h for h in held[-_OPEN_ITEMS:] if isinstance(h, dict) and h.get("index") == index), None)
        if found is None:
            held.append(piece)
        else:
            _add_delta(found, piece)
    return held
