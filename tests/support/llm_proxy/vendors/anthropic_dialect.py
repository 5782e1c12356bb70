"""Reads what the proxy says in Anthropic's dialect with the vendor's own package, as its client would."""

from __future__ import annotations

import json
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from fulmen_llm_proxy.apis.sse import EventSplitter

JSON = dict[str, Any]

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_LIMIT_BYTES = 1 << 24


def message_of(body: bytes) -> JSON:
    """Returns a whole answer, after the vendor's type took it."""
    Message.model_validate_json(body)
    return json.loads(body)


def events_of(stream: bytes) -> list[Any]:
    """Returns the events of a stream as the vendor's types, without pings; checks names, order and blocks.

    Blocks must be started, filled and stopped one after the other, with indices that count up from 0.
    """
    splitter = EventSplitter(_LIMIT_BYTES)
    events = []
    for raw in splitter.feed(stream):
        name, data = raw.decode().rstrip("\n").split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        if document["type"] != "ping":
            events.append(_EVENT.validate_python(document))
    assert splitter.rest() == b""
    check_order(events)
    return events


def check_order(events: list[Any]) -> None:
    """Checks that the events make one message, whose blocks do not overlap."""
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    current, following = None, 0
    for event in events[1:-2]:
        match event.type:
            case "content_block_start":
                assert current is None, "blocks overlap"
                assert event.index == following
                current, following = event.index, following + 1
            case "content_block_delta":
                assert event.index == current
            case "content_block_stop":
                assert event.index == current
                current = None
            case other:
                raise AssertionError(f"{other} between blocks")
    assert current is None, "a block was not stopped"


def accumulated(stream: bytes) -> JSON:
    """Returns the message that the vendor's client makes of a stream."""
    snapshot = None
    inputs: dict[int, bytes] = {}
    for event in events_of(stream):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=inputs)
    assert snapshot is not None
    return json.loads(snapshot.to_json())


def slim(message: JSON) -> JSON:
    """Returns a message without what is null or left out alike."""
    if isinstance(message, dict):
        return {key: slim(value) for key, value in message.items() if value is not None}
    return [slim(value) for value in message] if isinstance(message, list) else message
