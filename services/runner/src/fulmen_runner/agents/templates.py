"""Expands the placeholders of templates: arguments, environment values, manifests, prompts. See agent_spec.proto.

Invariant: what is put in for a placeholder is never looked at again, so that no input can add placeholders.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.program import Invocation

MAX_EXPANDED_LENGTH = 4 * 1024 * 1024
"""The most characters that the templates of one attempt may become together."""

_MAX_NAME_SHOWN = 60
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_TASK = "task"
_MEMBER = "task."


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """What placeholders stand for in one attempt.

    Attributes:
        input: The whole input: `{task}`.
        task: The decoded input, whose members are `{task.a.b}`.
        named: All others by name, such as `work_dir`.
    """

    input: bytes = field(repr=False)
    task: object = field(repr=False)
    named: Mapping[str, str] = field(repr=False)

    def value(self, name: str) -> str:
        """Returns what a placeholder stands for.

        Raises:
            LookupError: With what is wrong, if it stands for nothing.
        """
        if name in self.named:
            return self.named[name]
        if name == _TASK:
            return self.input.decode(errors="replace")
        if name.startswith(_MEMBER):
            return self._member(name)
        known = ", ".join(f"{{{each}}}" for each in (_TASK, "task.name", *self.named))
        raise LookupError(f"is no placeholder here; there are {known}, and {{{{ and }}}} for braces")

    def _member(self, name: str) -> str:
        value = self.task
        for part in name.removeprefix(_MEMBER).split("."):
            if not isinstance(value, dict) or part not in value:
                raise LookupError("is a member that the input has not")
            value = value[part]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def placeholders_of(invocation: Invocation, **named: str) -> Placeholders:
    """Returns what placeholders stand for in an attempt; `named` are those beside the input's, such as `work_dir`."""
    return Placeholders(input=invocation.assignment.input, task=invocation.task, named=named)


def expand(templates: Mapping[str, str], placeholders: Placeholders) -> dict[str, str]:
    """Expands templates; the keys say where each comes from, for a person, and are kept.

    Raises:
        AgentFailed: With all that is wrong with any of them.
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
                problems.append(f"{label}: the templates become longer than {MAX_EXPANDED_LENGTH} characters")
                raise AgentFailed(_report(problems))
        expanded[label] = "".join(parts)
    if problems:
        raise AgentFailed(_report(problems))
    return expanded


def expanded_variables(templates: Mapping[str, str], placeholders: Placeholders) -> dict[str, str]:
    """Expands the values of an environment. Raises AgentFailed."""
    labels = {f"environment {name}": template for name, template in templates.items()}
    return dict(zip(templates, expand(labels, placeholders).values(), strict=True))


def escaped(text: str) -> str:
    """Returns a template that expands to a text."""
    return text.replace("{", "{{").replace("}", "}}")


def _report(problems: list[str]) -> str:
    return "The agent's templates do not fit its input: " + "; ".join(problems) + "."


def _pieces(template: str, placeholders: Placeholders) -> Iterator[tuple[str, str]]:
    """Yields the text of each part of a template with what is wrong with it, empty if nothing is."""
    end = 0
    for token in _TOKEN.finditer(template):
        yield template[end : token.start()], ""
        end = token.end()
        name, text = token.group(1), token.group()
        if name is None:
            # Only a doubled brace has two characters.
            yield text[0], "" if len(text) > 1 else f"a single {text}, which is written {text}{text}"
            continue
        try:
            yield placeholders.value(name), ""
        except LookupError as error:
            shown = name if len(name) <= _MAX_NAME_SHOWN else f"{name[:_MAX_NAME_SHOWN]}…"
            yield "", f"{{{shown}}} {error.args[0]}"
    yield template[end:], ""
