"""Which tool the built-in model calls next, and with which arguments.

It calls each tool that the agent offers once, in their order, and then answers. Arguments are valid by the tool's JSON
schema (2020-12) as far as frameworks write them: no conditions, and of patterns only those that a simple text fits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ToolCall", "arguments_for", "next_call"]

MAX_DEPTH: Final = 8
_INTEGER: Final = re.compile(r"-?\d{1,15}")
# Texts of which one may fit a pattern, after those of the conversation.
_SAMPLES: Final = ("a", "A", "0", "00", "000", "0000", "A1", "a-1", "abc", "2026-01-02", "12:00", "a@example.com")
_FORMATS: Final[Mapping[str, str]] = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


def next_call(request: Json, text: str) -> ToolCall | None:
    """Returns the tool that a request's answer calls; None if it answers with text.

    Args:
        request: A request of Chat Completions, Messages or Responses.
        text: Where numbers and texts of the arguments are taken from.
    """
    tools = list(_tools(request))
    done = _result_count(request)
    choice = request.get("tool_choice")
    wanted = _wanted(choice)
    if wanted:
        tools = [each for each in tools if each[0] == wanted]
    must_call = bool(wanted) or choice in ("required", {"type": "any"})
    if not tools or choice in ("none", {"type": "none"}) or (done >= len(tools) and not must_call):
        return None
    name, schema = tools[done % len(tools)]
    return ToolCall(id=f"call_{done}", name=name, arguments=arguments_for(schema, text))


def arguments_for(schema: Json, text: str) -> dict[str, Any]:
    """Returns arguments that a tool's schema allows: what it requires, and no more."""
    made = _Maker(schema, text).value(schema)
    return made if isinstance(made, dict) else {}


def _tools(request: Json) -> Iterator[tuple[str, Json]]:
    """Yields the name and the schema of each function."""
    offered = request.get("tools")
    for tool in offered if isinstance(offered, list) else ():
        described = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(described, dict) and isinstance(described.get("name"), str):
            schema = described.get("parameters") or described.get("input_schema")
            # The vendor's own tools run at the vendor, and have no schema.
            if isinstance(schema, dict) or tool.get("type") == "function":
                yield described["name"], schema if isinstance(schema, dict) else {}


def _wanted(choice: object) -> str:
    """Returns the tool that a request insists on; empty for none."""
    match choice:
        case {"function": {"name": str(name)}} | {"type": "tool" | "function", "name": str(name)}:
            return name
        case _:
            return ""


def _result_count(request: Json) -> int:
    """Returns how many results of tools there are since the last message of the user."""
    turns = request.get("messages") or request.get("input")
    count = 0
    for turn in reversed(turns if isinstance(turns, list) else []):
        match turn:
            case {"role": "tool"} | {"type": "function_call_output"}:
                count += 1
            case {"role": "user", "content": [*parts]} if any(_is_result(part) for part in parts):
                count += sum(_is_result(part) for part in parts)
            case {"role": "user"}:
                break
            case _:
                pass
    return count


def _is_result(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes values of one schema.

    Attributes:
        root: The schema that references are resolved in.
        text: Where numbers and texts are taken from.
    """

    root: Json
    text: str

    def value(self, schema: object, depth: int = 0) -> Any:
        """Returns a value that a schema allows; None where it nests too deeply or allows anything."""
        schema = self._resolved(schema, depth)
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        for key in ("enum", "examples"):
            if schema.get(key):
                return schema[key][0]
        kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "")
        if isinstance(kind, list):
            kind = next((each for each in kind if each != "null"), "null")
        return self._of_kind(str(kind), schema, depth)

    def _of_kind(self, kind: str, schema: Json, depth: int) -> Any:
        match kind:
            case "object":
                wanted, known = schema.get("required") or (), schema.get("properties") or {}
                return {name: self.value(known.get(name, {"type": "string"}), depth + 1) for name in wanted}
            case "array":
                fixed = [self.value(each, depth + 1) for each in schema.get("prefixItems") or ()]
                more = max(0, schema.get("minItems", 0) - len(fixed))
                return fixed + [self.value(schema.get("items"), depth + 1) for _ in range(more)]
            case "integer":
                return self._integer(schema)
            case "number":
                low, high = _bounds(schema, step=0.0)
                return min(max(0.0, low), high) if "multipleOf" not in schema else self._integer(schema)
            case "boolean":
                return False
            case "string":
                return self._string(schema)
            case _:
                return None

    def _resolved(self, schema: object, depth: int) -> object:
        """Returns a schema without references and alternatives: the first that is not null."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return schema
            rest = {key: each for key, each in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
            if isinstance(schema.get("$ref"), str):
                found: Any = self.root
                for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
                    found = found.get(part) if isinstance(found, dict) else None
                parts = [found]
            elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
                parts = [next((each for each in alternatives if each != {"type": "null"}), alternatives[0])]
            elif schema.get("allOf"):
                parts = [self._resolved(each, depth) for each in schema["allOf"]]
            else:
                return schema
            schema = _merged([rest, *parts])
        return schema

    def _integer(self, schema: Json) -> int:
        """Returns the first integer of the text within the bounds, otherwise the one next to 0."""
        step = schema.get("multipleOf", 1)
        low, high = _bounds(schema, step=step)
        fitting = (int(each) for each in _INTEGER.findall(self.text))
        found = next((each for each in fitting if low <= each <= high and each % step == 0), None)
        if found is not None:
            return found
        if low <= 0 <= high:
            return 0
        return int(math.ceil(low / step) * step) if low > 0 else int(math.floor(high / step) * step)

    def _string(self, schema: Json) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        pattern = str(schema.get("pattern", ""))
        for sample in itertools.chain((self.text, *self.text.split()), _SAMPLES):
            padded = sample.ljust(shortest, "a")
            padded = padded if len(padded) <= longest else padded[: int(longest)]
            if _fits(pattern, padded):
                return padded
        return self.text


def _merged(parts: list[Any]) -> dict[str, Any]:
    """Joins schemas that all hold."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in (part if isinstance(part, dict) else {}).items():
            if key == "properties":
                merged[key] = {**merged.get(key, {}), **value}
            elif key == "required":
                merged[key] = [*dict.fromkeys([*merged.get(key, []), *value])]
            else:
                merged[key] = value
    return merged


def _bounds(schema: Json, *, step: float) -> tuple[float, float]:
    """Returns the lowest and the highest number; of exclusive bounds the next that is a step away."""
    room = step or 1e-6
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf) + room)
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf) - room)
    return low, high


def _fits(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True
