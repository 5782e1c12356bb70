"""Prompts of the critic and the editor, parsers of their answers, and the report of a search."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulmen_algorithm.algorithms.prompts.candidates import Candidate, placeholders
from fulmen_algorithm.rollouts.trajectory import Conversation

SHOWN_CHARS = 2000
SHOWN_TRACE_CHARS = 6000
_ANSWER = re.compile(r"<prompt>\n?(.*?)\n?</prompt>", re.DOTALL)
_CRITIC = """\
You improve prompts. An agent works with the prompt template below; the examples show tasks that it did badly. Say what \
in the prompt causes that, in a few sentences: what is missing, wrong or unclear. Judge the prompt and not the tasks: \
advice that fits one task alone is of no use. Do not write a new prompt."""
_EDITOR = """\
You improve prompts. Rewrite the prompt template below so that the criticism does not hold any more. Change no more than \
that needs. {rule}Answer with the whole new template between <prompt> and </prompt>, and with nothing else."""
_PARAPHRASER = """\
You improve prompts. Say the prompt template below in other words, with the same meaning. {rule}Answer with the whole new \
template between <prompt> and </prompt>, and with nothing else."""
_REFLECTOR = """\
You improve prompts. An agent works with the prompt template below. Each example is a task that it did, with what it and \
its tools wrote, its result and its reward; higher is better. Find out from the examples what the task asks for, which \
facts and which ways to work help, and where the agent went wrong. Then write a template that makes all of this plain to \
the agent, general enough for tasks that are not shown. {rule}Answer with the whole new template between <prompt> and \
</prompt>."""
_MERGER = """\
You improve prompts. Each of the two prompt templates below is the best at some tasks. Write one template that keeps what is \
good in both. {rule}Answer with the whole new template between <prompt> and </prompt>, and with nothing else."""
_RULE = "Keep these placeholders exactly as they are, and add none: {names}. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A rollout with a low reward.

    Attributes:
        task: Input of the agent, JSON.
        output: Its result, or its failure.
        reward: Its reward.
        trace: What the agent, its model and its tools wrote; empty if it is not known.
    """

    task: str
    output: str
    reward: float
    trace: str = ""


def critic_messages(template: str, examples: Sequence[Example]) -> list[dict[str, str]]:
    """Returns the request for criticism of a prompt: the textual gradient."""
    user = f"<template>\n{template}\n</template>\n\n{_shown(examples)}"
    return [{"role": "system", "content": _CRITIC}, {"role": "user", "content": user}]


def reflection_messages(template: str, examples: Sequence[Example]) -> list[dict[str, str]]:
    """Asks for a better prompt by reflection on traces."""
    user = f"<template>\n{template}\n</template>\n\n{_shown(examples)}"
    return [{"role": "system", "content": _REFLECTOR.format(rule=_rule(template))}, {"role": "user", "content": user}]


def merge_messages(template: str, other: str) -> list[dict[str, str]]:
    """Asks for a prompt that joins two."""
    user = f"<template>\n{template}\n</template>\n\n<other>\n{other}\n</other>"
    return [{"role": "system", "content": _MERGER.format(rule=_rule(template))}, {"role": "user", "content": user}]


def _shown(examples: Sequence[Example]) -> str:
    parts = []
    for each in examples:
        trace = f"<trace>{each.trace[:SHOWN_TRACE_CHARS]}</trace>\n" if each.trace else ""
        parts.append(
            f"<example>\n<task>{each.task[:SHOWN_CHARS]}</task>\n{trace}<output>{each.output[:SHOWN_CHARS]}</output>\n"
            f"<reward>{each.reward:g}</reward>\n</example>"
        )
    return "\n\n".join(parts)


def trace_text(conversations: Sequence[Conversation]) -> str:
    """Renders the messages of a rollout's conversations, for a model that reflects on them."""
    lines = []
    for messages, _tools in conversations:
        for message in messages:
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
            calls = f" {json.dumps(message['tool_calls'], ensure_ascii=False)}" if message.get("tool_calls") else ""
            lines.append(f"{message.get('role', '')}: {text}{calls}")
    return "\n".join(lines)


def editor_messages(template: str, criticism: str) -> list[dict[str, str]]:
    """Asks for a better prompt: a step against the gradient."""
    system = _EDITOR.format(rule=_rule(template))
    user = f"<template>\n{template}\n</template>\n\n<criticism>\n{criticism}\n</criticism>"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def paraphrase_messages(template: str) -> list[dict[str, str]]:
    """Asks for the same prompt in other words: a step beside the gradient, for a better one nearby."""
    user = f"<template>\n{template}\n</template>"
    return [{"role": "system", "content": _PARAPHRASER.format(rule=_rule(template))}, {"role": "user", "content": user}]


def _rule(template: str) -> str:
    names = ", ".join(sorted(placeholders(template)))
    return _RULE.format(names=names) if names else ""


def edited_prompt(answer: str) -> str:
    """Extracts the prompt from an editor's answer; empty if it has none."""
    found = _ANSWER.findall(answer)
    return str(found[-1]).strip() if found else ""


def tree(candidates: Mapping[str, Candidate], *, beam: Sequence[str], best: str) -> str:
    """Renders the candidates as a tree of edits, with their scores."""
    lines: list[str] = []

    def show(candidate: Candidate, depth: int) -> None:
        score = f"train {candidate.mean:.3f} (n = {len(candidate.rewards)})" if candidate.rewards else "not measured"
        validation = "" if candidate.validation is None else f", validation {candidate.validation:.3f}"
        mark = " **best**" if candidate.id == best else " in the beam" if candidate.id in beam else ""
        why = f": {_short(candidate.gradient)}" if candidate.gradient else ""
        lines.append(f"{'  ' * depth}- `{candidate.id}` {score}{validation}{mark}{why}")
        for child in candidates.values():
            if child.parent == candidate.id:
                show(child, depth + 1)

    for candidate in candidates.values():
        if not candidate.parent:
            show(candidate, 0)
    return "\n".join(lines)


def difference(first: str, best: str) -> str:
    """Renders the changes of the first prompt as a unified diff in Markdown."""
    lines = difflib.unified_diff(first.splitlines(), best.splitlines(), "first", "best", lineterm="", n=3)
    text = "\n".join(lines)
    # A prompt may itself contain code fences.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}diff\n{text}\n{fence}" if text else "The first prompt is still the best one."


def task_text(task: bytes) -> str:
    """Renders a task for the critic."""
    return json.dumps(json.loads(task), ensure_ascii=False)


def _short(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
