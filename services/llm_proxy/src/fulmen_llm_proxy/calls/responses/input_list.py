"""The list of a stored response's input items: all that the model was given, so those of the responses before it, too.

Source: `GET /responses/{id}/input_items` of OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from fulmen.errors import ArgumentInvalid, Violation
from fulmen_llm_proxy.apis.api import UNREADABLE, encode
from fulmen_llm_proxy.calls.responses.response_store import KeptResponse

_MAX_LIMIT: Final = 100
_LIMIT: Final = 20
_ORDERS: Final = ("asc", "desc")
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ITEM = msgspec.json.Decoder(dict[str, Any])


def input_list(newest: KeptResponse, earlier: Sequence[KeptResponse], query: Mapping[str, str]) -> bytes:
    """Returns one page of the list, as JSON.

    Args:
        newest: the response.
        earlier: those before it, newest first.
        query: `limit`, `order` and `after`; others are ignored.

    Raises:
        ArgumentInvalid: if a parameter is invalid; names all of them.
    """
    items = list(_items(newest, earlier))
    limit, order, after = query.get("limit", str(_LIMIT)), query.get("order", "desc"), query.get("after", "")
    problems = []
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_LIMIT):
        problems.append(Violation(field="limit", description=f"must be 1 to {_MAX_LIMIT}"))
    if order not in _ORDERS:
        problems.append(Violation(field="order", description="must be asc or desc"))
    if order == "desc":
        items.reverse()
    start = 0
    if after:
        start = next((place for place, item in enumerate(items, 1) if item["id"] == after), -1)
        if start < 0:
            problems.append(Violation(field="after", description="is not an item of the list"))
    if problems:
        raise ArgumentInvalid("The request is malformed.", violations=problems)
    page = items[start : start + int(limit)]
    return encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(items),
        }
    )


def _items(newest: KeptResponse, earlier: Sequence[KeptResponse]) -> Iterable[dict[str, Any]]:
    for response in (*reversed(earlier), newest):
        said = [*response.input, *(() if response is newest else response.output)]
        for place, raw in enumerate(said):
            try:
                yield _item(_ITEM.decode(raw), f"{response.id}_{place}")
            except UNREADABLE:
                continue  # only objects were sent to a model


def _item(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Returns an item as the vendor lists it: with an id, and the content of a message in parts."""
    kind = str(item.get("type") or ("message" if item.get("role") else "item"))
    listed = {"id": f"{_PREFIXES.get(kind, 'item')}_{suffix}", "type": kind, **item}
    if not isinstance(listed["id"], str):
        listed["id"] = f"{_PREFIXES.get(kind, 'item')}_{suffix}"
    if kind == "message":
        content = item.get("content")
        if isinstance(content, str):
            is_own = item.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if is_own else {"type": "input_text"}
            listed["content"] = [{**part, "text": content}]
        listed.setdefault("status", "completed")
    return listed
