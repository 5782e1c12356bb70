"""Data sets in JSON Lines. All bad lines are reported together, by number."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fulmen.errors import Violation

Parsed = TypeVar("Parsed")
LINES_REPORTED = 50
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to train on.

    Attributes:
        messages: OpenAI chat messages; at least one is the assistant's.
        tools: OpenAI definitions of the tools offered; may be empty.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to the same prompt, of which one is better.

    Attributes:
        prompt: OpenAI chat messages before the answers.
        chosen: Messages of the better answer; at least one is the assistant's.
        rejected: Messages of the other.
        tools: OpenAI definitions of the tools offered; may be empty.
    """

    prompt: Sequence[Mapping[str, Any]]
    chosen: Sequence[Mapping[str, Any]]
    rejected: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


def read_tasks(content: bytes, *, field: str) -> tuple[list[bytes], list[Violation]]:
    """Reads tasks: each line is a JSON value, passed to the agent unchanged."""
    return _lines(content, field, lambda value: json.dumps(value, separators=(",", ":")).encode())


def read_demonstrations(content: bytes, *, field: str) -> tuple[list[Demonstration], list[Violation]]:
    """Reads demonstrations: each line is an object with `messages` and optional `tools`."""
    return _lines(content, field, _demonstration)


def read_preferences(content: bytes, *, field: str) -> tuple[list[Preference], list[Violation]]:
    """Reads preferences: each line is an object with `prompt`, `chosen`, `rejected` and optional `tools`."""
    return _lines(content, field, _preference)


def prompt_problems(content: bytes, *, field: str) -> list[Violation]:
    """Returns the problems of a prompt, which must be non-empty UTF-8 text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return [Violation(field=field, description="the prompt is not UTF-8")]
    return [] if text.strip() else [Violation(field=field, description="the prompt is empty")]


def _demonstration(value: Any) -> Demonstration:
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise ValueError("needs a list `messages`")
    messages = value["messages"]
    _check_messages(messages, "")
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError("has no message with the role assistant")
    return Demonstration(messages=messages, tools=_tools(value))


def _preference(value: Any) -> Preference:
    if not isinstance(value, dict):
        raise ValueError("needs `prompt`, `chosen` and `rejected`")
    parts: dict[str, Any] = {name: value.get(name) for name in ("prompt", "chosen", "rejected")}
    if missing := [name for name, part in parts.items() if not isinstance(part, list) or not part]:
        raise ValueError(f"needs a list of messages `{'`, `'.join(missing)}`")
    for name, part in parts.items():
        _check_messages(part, f"{name}: ")
        if name != "prompt" and not any(m["role"] == "assistant" for m in part):
            raise ValueError(f"{name}: has no message with the role assistant")
    if parts["chosen"] == parts["rejected"]:
        raise ValueError("`chosen` and `rejected` are the same")
    return Preference(**parts, tools=_tools(value))


def _check_messages(messages: Any, where: str) -> None:
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"{where}message {number} needs a `role`, one of {', '.join(_ROLES)}")


def _tools(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    tools = value.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("`tools` must be a list of objects")
    return tools


def _problem(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"not JSON: {error.msg}"
        case UnicodeDecodeError():
            return f"not UTF-8: see byte {error.start + 1}"
        case RecursionError():
            return "is nested too deeply"
        case _:
            return str(error)


def _lines(content: bytes, field: str, parse: Callable[[Any], Parsed]) -> tuple[list[Parsed], list[Violation]]:
    """Parses the lines that are not blank; at most `LINES_REPORTED` bad ones are described, the others counted."""
    parsed: list[Parsed] = []
    bad: list[Violation] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(json.loads(line)))
        except (ValueError, RecursionError) as error:
            bad.append(Violation(field=f"{field}:{number}", description=_problem(error)))
    if len(bad) > LINES_REPORTED:
        rest = len(bad) - LINES_REPORTED
        bad = [*bad[:LINES_REPORTED], Violation(field=field, description=f"{rest} more lines are malformed")]
    if not parsed and not bad:
        bad = [Violation(field=field, description="the data set is empty")]
    return parsed, bad
