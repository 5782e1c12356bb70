"""Expands placeholders in templates: arguments, environment values, manifests and prompts. See agent_spec.proto.

Invariant: substituted values are not expanded again, so that an input cannot inject placeholders.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.program import Invocation

MAX_EXPANDED_LENGTH = 4 * 1024 * 1024
"""Maximum total length of the expanded templates of one attempt, in characters."""

_MAX_NAME_SHOWN = 60
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_TASK = "task"
_MEMBER = "task."


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """Values of placeholders in one attempt.

    Attributes:
        input: The encoded input: `{task}`.
        task: The decoded input, for members such as `{task.a.b}`.
        named: Further values by name, such as `work_dir`.
    """

    input: bytes = field(repr=False)
    task: object = field(repr=False)
    named: Mapping[str, str] = field(repr=False)

    def value(self, name: str) -> str:
        """Returns the value of a placeholder.

        Raises:
            LookupError: If it has none; the message has the reason.
        """
        if name in self.named:
            return self.named[name]
        if name == _TASK:
            return self.input.decode(errors="replace")
        if name.startswith(_MEMBER):
            return self._member(name)
        known = ", ".join(f"{{{each}}}" for each in (_TASK, "task.name", *self.named))
        raise LookupError(f"is not a placeholder; use {known}, or {{{{ and }}}} for braces")

    def _member(self, name: str) -> str:
        value = self.task
        for part in name.removeprefix(_MEMBER).split("."):
            if not isinstance(value, dict) or part not in value:
                raise LookupError("is not a member of the input")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def placeholders_of(invocation: Invocation, **named: str) -> Placeholders:
    """Returns the placeholders of an attempt; `named` are those besides the input's, such as `work_dir`."""
    return Placeholders(input=invocation.assignment.input, task=invocation.task, named=named)


def expand(templates: Mapping[str, str], placeholders: Placeholders) -> dict[str, str]:
    """Expands templates by label; the labels name them in errors.

    Raises:
        AgentFailed: If a placeholder has no value; lists all problems.
    """
    expanded: dict[str, str] = {}
    problems: list[str] = []
    length = 0
    for label, template in templates.items():
        parts: list[str] = []
        for text, problem in _pieces(template, placeholders):
            parts.append(text)
            length += len(text)
            if problem:
                problems.append(f"{label}: {problem}")
            if length > MAX_EXPANDED_LENGTH:
                problems.append(f"{label}: expanded templates exceed {MAX_EXPANDED_LENGTH} characters")
                raise AgentFailed(_report(problems))
        expanded[label] = "".join(parts)
    if problems:
        raise AgentFailed(_report(problems))
    return expanded


def expanded_variables(templates: Mapping[str, str], placeholders: Placeholders) -> dict[str, str]:
    """Expands the values of environment variables. Raises AgentFailed."""
    labels = {f"environment {name}": template for name, template in templates.items()}
    return dict(zip(templates, expand(labels, placeholders).values(), strict=True))


def escaped(text: str) -> str:
    """Returns a template that expands to a text."""
    return text.replace("{", "{{").replace("}", "}}")


def _report(problems: list[str]) -> str:
    return "templates of the agent do not match its input: " + "; ".join(problems)


def _pieces(template: str, placeholders: Placeholders) -> Iterator[tuple[str, str]]:
    """Yields each piece of the expanded template with its problem, empty if there is none."""
    end = 0
    for token in _TOKEN.finditer(template):
        yield template[end : token.start()], ""
        end = token.end()
        name, text = token.group(1), token.group()
        if name is None:
            # A doubled brace has two characters.
            yield text[0], "" if len(text) > 1 else f"single {text}; write {text}{text}"
            continue
        try:
            yield placeholders.value(name), ""
        except LookupError as error:
            shown = name if len(name) <= _MAX_NAME_SHOWN else f"{name[:_MAX_NAME_SHOWN]}…"
            yield "", f"{{{shown}}} {error.args[0]}"
    yield template[end:], ""
