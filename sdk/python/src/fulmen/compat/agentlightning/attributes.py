"""Names of Agent Lightning's spans and attributes, and how nested values are written as attributes.

Source: the semantic conventions of agentlightning 0.3.0, `agentlightning/semconv.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["flat", "nested", "reward_in", "rewards_in"]

AGL_ANNOTATION: Final = "agentlightning.annotation"
AGL_OPERATION: Final = "agentlightning.operation"
AGL_REWARD: Final = "agentlightning.reward"
REWARD: Final = "agentlightning.reward"
LINK: Final = "agentlightning.link"
TAG: Final = "agentlightning.tag"
MESSAGE_BODY: Final = "agentlightning.message.body"
OBJECT_JSON: Final = "agentlightning.object.json"
OBJECT_LITERAL: Final = "agentlightning.object.literal"
OPERATION_NAME: Final = "agentlightning.operation.name"
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"

MAX_DIGITS: Final = 10
_AGENTOPS_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")


class NamedReward(NamedTuple):
    """A reward of a span."""

    name: str
    value: float


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dictionaries and lists as one dictionary with dotted names; lists of texts or numbers stay lists."""
    return dict(_flat(value, ""))


def _flat(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"Only string keys are supported in dictionaries, got {key!r} in {place!r}")
            yield from _flat(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and not (value and place and all(isinstance(x, str | int | float) for x in value)):
        for index, item in enumerate(value):
            yield from _flat(item, f"{place}.{index}" if place else str(index))
    elif isinstance(value, str | int | float | list):
        yield place, value
    else:
        yield place, json.dumps(value, default=str)


def nested(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Returns the attributes below a prefix as nested values; names 0 to n-1 become a list. Empty if there are none."""
    root: dict[str, Any] = {}
    begin = f"{prefix}."
    for name, value in attributes.items():
        if not name.startswith(begin):
            continue
        *path, last = name[len(begin) :].split(".")
        at = root
        for part in path:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[last] = value
    return _with_lists(root)


def _with_lists(node: dict[str, Any]) -> Any:
    found = {key: _with_lists(value) if isinstance(value, dict) else value for key, value in node.items()}
    if "0" in found and all(key.isascii() and key.isdigit() and len(key) < MAX_DIGITS for key in found):
        places = sorted(int(key) for key in found)
        if places == list(range(len(places))):
            return [found[str(place)] for place in places]
    return found


def rewards_in(attributes: Mapping[str, Any]) -> list[NamedReward]:
    """Returns the rewards of a span, the primary one first; empty if it has none."""
    found = nested(attributes, REWARD)
    if not isinstance(found, list):
        return []
    return [NamedReward(str(each["name"]), float(each["value"])) for each in found]


def reward_in(name: str, attributes: Mapping[str, Any]) -> float | None:
    """Returns the primary reward of a span: as versions 0.3 and 0.2 write it, or their older decorator; None without one."""
    if rewards := rewards_in(attributes):
        return rewards[0].value
    for key in _AGENTOPS_OUTPUTS:
        output = attributes.get(key)
        if isinstance(output, str):
            try:
                output = json.loads(output)
            except json.JSONDecodeError:
                continue
        if isinstance(output, Mapping) and output.get("type") == "reward":
            return output.get("value")
    return attributes.get("reward") if name == AGL_ANNOTATION else None
