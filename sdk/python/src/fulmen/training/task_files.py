"""Reads and validates the tasks and demonstrations of a training; reports all malformed lines together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fulmen.train_toml.train import ConfigError, DataConfig

__all__ = ["Dataset", "checked_datasets", "read_datasets"]

# The limits of the contract: Rollout.input and ResourceVersion.content.
MAX_TASK_BYTES: Final = 256 * 1024
MAX_DATASET_BYTES: Final = 16 * 1024 * 1024
MAX_PROBLEMS_SHOWN: Final = 200
_MESSAGE_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Validated data.

    Attributes:
        use: the training run's input that it becomes, such as `train_tasks`.
        content: its lines, blank ones left out, each ended by a newline.
        count: number of lines.
    """

    use: str
    content: bytes
    count: int

    @property
    def sha256(self) -> bytes:
        """Digest that identifies the content."""
        return hashlib.sha256(self.content).digest()


def read_datasets(data: DataConfig) -> dict[str, Dataset]:
    """Reads every file that the configuration names, by use.

    Raises:
        ConfigError: with every malformed line as `file:line: what is wrong`.
    """
    files = {
        "train_tasks": data.train,
        "validation_tasks": data.validation,
        "test_tasks": data.test,
        "demonstrations": data.demonstrations,
        "validation_demonstrations": data.validation_demonstrations,
        "preferences": data.preferences,
    }
    return checked_datasets(
        {use: (_shown(path), path.read_bytes().split(b"\n")) for use, path in files.items() if path is not None}
    )


def checked_datasets(given: Mapping[str, tuple[str, Iterable[bytes]]]) -> dict[str, Dataset]:
    """Validates data, given by use as what they are called in errors and their lines.

    Raises:
        ConfigError: with every malformed line as `name:line: what is wrong`.
    """
    problems: list[str] = []
    found = {use: _checked(use, shown, lines, problems) for use, (shown, lines) in given.items()}
    if problems:
        listed = problems[:MAX_PROBLEMS_SHOWN]
        if len(problems) > len(listed):
            listed.append(f"… and {len(problems) - len(listed)} more")
        plural = "s" if len(problems) > 1 else ""
        raise ConfigError(f"The data files have {len(problems)} problem{plural}; nothing was created.", listed)
    return found


def _checked(use: str, shown: str, lines: Iterable[bytes], problems: list[str]) -> Dataset:
    rule = _RULES.get(use, _no_rule)
    kept: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        stripped = line.strip()
        if not stripped:
            continue
        problem = _problem(stripped, rule)
        if problem:
            problems.append(f"{shown}:{number}: {problem}")
        kept.append(stripped + b"\n")
    content = b"".join(kept)
    if not kept:
        problems.append(f"{shown}: empty")
    if len(content) > MAX_DATASET_BYTES:
        problems.append(f"{shown}: {len(content)} bytes, maximum {MAX_DATASET_BYTES}")
    return Dataset(use=use, content=content, count=len(kept))


def _problem(line: bytes, rule: Callable[[dict[str, Any]], str]) -> str:
    """Returns the problem of a line; empty if it is valid."""
    if len(line) > MAX_TASK_BYTES:
        return f"the line has {len(line)} bytes, maximum {MAX_TASK_BYTES}"
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} (column {error.colno})"
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"must be a JSON object, not {_json_type(value)}"
    return rule(value)


def _check_demonstration(value: dict[str, Any]) -> str:
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        return 'a demonstration needs "messages", a list that is not empty'
    if problem := _messages_problem("messages", messages):
        return problem
    if not any(message["role"] == "assistant" for message in messages):
        return "no message has the role assistant, so there is nothing to learn"
    return ""


def _check_preference(value: dict[str, Any]) -> str:
    for name in ("prompt", "chosen", "rejected"):
        messages = value.get(name)
        if not isinstance(messages, list) or not messages:
            return f'a preference needs "{name}", a list of messages that is not empty'
        if problem := _messages_problem(name, messages):
            return problem
        if name != "prompt" and not any(message["role"] == "assistant" for message in messages):
            return f"no message of {name} has the role assistant"
    return '"chosen" and "rejected" are the same' if value["chosen"] == value["rejected"] else ""


def _messages_problem(name: str, messages: list[Any]) -> str:
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"{name}[{index}] must be an object"
        if message.get("role") not in _MESSAGE_ROLES:
            return f"{name}[{index}].role must be one of {', '.join(sorted(_MESSAGE_ROLES))}"
        if "content" not in message and "tool_calls" not in message:
            return f'{name}[{index}] needs "content" or "tool_calls"'
    return ""


def _no_rule(value: dict[str, Any]) -> str:
    return "" if value else "the object is empty"


_RULES: Final[Mapping[str, Callable[[dict[str, Any]], str]]] = {
    "demonstrations": _check_demonstration,
    "validation_demonstrations": _check_demonstration,
    "preferences": _check_preference,
}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text} is out of range")
    return number


def _json_type(value: Any) -> str:
    match value:
        case list():
            return "a list"
        case str():
            return "a text"
        case bool():
            return "a boolean"
        case None:
            return "null"
        case _:
            return "a number"


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
