"""Translates the tools of a Responses request to functions of chat completions, and maps functions back to the
caller's tools.

Chat completions have functions only, in one list. A tool of a namespace becomes the function `namespace__name`. A custom
tool, whose input is a text, becomes a function with that text as its only argument, as engines constrain no grammar of a
vendor's form. Both are the caller's own again in the answer. Tools that a vendor's service runs are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE, encode, read
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.translation.translator import UnsupportedFields

JSON = dict[str, object]

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_NULL = b"null"


class _Grammar(msgspec.Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Fields | None = None
    strict: bool | None = None
    format: _Grammar | None = None
    tools: list[_Tool] = []


class _ChosenTool(msgspec.Struct):
    type: str
    name: str | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[_ChosenTool] = []


class _CustomInput(msgspec.Struct, forbid_unknown_fields=True):
    input: str


_TOOLS = msgspec.json.Decoder(list[_Tool] | None)
_TOOL_CHOICE = msgspec.json.Decoder(str | _ToolChoice | None)
_CUSTOM_INPUT = msgspec.json.Decoder(_CustomInput)


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A tool as its caller knows it.

    Attributes:
        name: its name, within its namespace if it has one.
        namespace: the namespace's name.
        custom: whether its input is a text instead of arguments.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


def function_name(name: str, namespace: str | None) -> str:
    """Returns the name of the function that stands for a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def own_tools(fields: Fields) -> dict[str, OwnTool]:
    """Returns the tools whose calls differ from those of functions, by the function's name.

    Raises:
        ArgumentInvalid: if `tools` has the wrong type.
    """
    found = {}
    for tool, space in _each(read(fields, "tools", _TOOLS, None) or ()):
        custom = tool.type == "custom"
        if tool.name and (custom or space is not None):
            own = OwnTool(tool.name, space.name if space else None, custom)
            found[function_name(own.name, own.namespace)] = own
    return found


def arguments_of(text: str) -> str:
    """Returns the arguments of the function that stands for a custom tool, spaced as most models are trained to write."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the input of a custom tool; what the model wrote, if those are not arguments of its function."""
    try:
        return _CUSTOM_INPUT.decode(arguments).input
    except (*UNREADABLE, UnicodeEncodeError):
        return arguments


def add_tools(fields: Fields, chat: Fields, unsupported: UnsupportedFields) -> None:
    """Adds the tools of a Responses request, and its settings for their use, to a chat request.

    Raises:
        ArgumentInvalid: if a field has the wrong type.
    """
    functions: list[JSON] = []
    taken: set[str] = set()
    own = own_tools(fields)
    for tool, space in _each(read(fields, "tools", _TOOLS, None) or ()):
        if tool.type not in ("function", "custom") or not tool.name:
            unsupported.param("tools", f"the tool '{tool.name or tool.type}' of type '{tool.type}'")
            continue
        name = function_name(tool.name, space.name if space else None)
        if name in own and name in taken:
            unsupported.add(f"two tools that are the function '{name}'")
        taken.add(name)
        functions.append(_function(name, tool, space))
    choice = _tool_choice(read(fields, "tool_choice", _TOOL_CHOICE, None), unsupported)
    if not functions:
        return  # servers reject a tool choice without tools
    chat["tools"] = _raw([{"type": "function", "function": function} for function in functions])
    if choice is not None:
        chat["tool_choice"] = _raw(choice)
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and bytes(parallel) != _NULL:
        chat["parallel_tool_calls"] = parallel


def _each(tools: list[_Tool] | tuple[()]) -> Iterator[tuple[_Tool, _Tool | None]]:
    """Yields tools with the namespace that each belongs to."""
    for tool in tools:
        if tool.type == "namespace" and tool.name:
            yield from ((inner, tool) for inner in tool.tools)
        else:
            yield tool, None


def _function(name: str, tool: _Tool, space: _Tool | None) -> JSON:
    custom = tool.type == "custom"
    said = [space.description if space is not None else None, tool.description]
    if custom and tool.format is not None and tool.format.type == "grammar":
        said.append(f"`input` follows this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    translated = {
        "name": name,
        "description": "\n\n".join(text for text in said if text) or None,
        "parameters": _INPUT if custom else tool.parameters,
        "strict": tool.strict,
    }
    return {key: value for key, value in translated.items() if value is not None}


def _tool_choice(choice: str | _ToolChoice | None, unsupported: UnsupportedFields) -> str | JSON | None:
    match choice:
        case None | str():
            return choice
        case _ToolChoice(type="function" | "custom", name=str(name)):
            return _named(name)
        case _ToolChoice(type="allowed_tools") if all(tool.type in ("function", "custom") for tool in choice.tools):
            allowed = [_named(tool.name) for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}}
        case _:
            unsupported.param("tool_choice", f"`tool_choice` of type '{choice.type}'")
            return None


def _named(name: str | None) -> JSON:
    return {"type": "function", "function": {"name": name}}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encode(value))
