"""Prints an attempt: its tree of spans and model calls, tokens, rewards, outcome and hints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from fulmen.ids import trace_id_of
from fulmen_cli.agent.answers import text_of, tool_names_of
from fulmen_cli.agent.recording import CallRecord, Recording
from fulmen_cli.output import as_dict
from fulmen_cli.rollout.traces import SpanNode, cut, grow, last_message

__all__ = ["as_json", "show"]

LABEL_WIDTH: Final = 10
MAX_OUTCOME: Final = 1000
_INDENT: Final = " " * LABEL_WIDTH


def show(screen: Console, ended: Mapping[str, Any], recording: Recording, advice: Sequence[str]) -> None:
    """Prints one attempt."""
    calls = recording.calls(ended["rollout"])
    nodes = [SpanNode(span=span, lines=[]) for span in recording.spans(_trace_id(ended))]
    nodes += [SpanNode(span=call.span(), lines=_lines(call)) for call in calls]
    if nodes:
        root = Tree(Text(ended["rollout"], style="bold"))
        grow(root, nodes)
        screen.print(root)
    _row(screen, "outcome", _cut(ended["outcome"]) or "nothing")
    for line in _rewards(ended["rewards"]):
        _row(screen, "reward", line)
    _row(screen, "tokens", _tokens(calls))
    _row(screen, "took", f"{ended['seconds']:.2f} s")
    failure = ended["failure"]
    if failure is None:
        _row(screen, "result", "succeeded", style="bold green")
    else:
        _row(screen, "result", f"failed: {failure['kind']}", style="bold red")
        screen.print(Text(textwrap.indent(failure["message"].rstrip(), _INDENT)))
    for each in advice:
        _row(screen, "hint", each, style="yellow")


def as_json(ended: Mapping[str, Any], recording: Recording, advice: Sequence[str]) -> dict[str, Any]:
    """Returns one attempt as JSON-ready values."""
    return {
        **ended,
        "model_calls": [
            {
                "path": call.path,
                "model": call.model,
                "status": call.status,
                "prompt_tokens": call.usage.prompt,
                "completion_tokens": call.usage.completion,
                "seconds": (call.ended_ns - call.started_ns) / 1e9,
                "error": call.error,
            }
            for call in recording.calls(ended["rollout"])
        ],
        "spans": [as_dict(span) for span in recording.spans(_trace_id(ended))],
        "hints": list(advice),
    }


def _trace_id(ended: Mapping[str, Any]) -> bytes:
    return bytes.fromhex(trace_id_of(ended["rollout"]))


def _row(screen: Console, label: str, text: str, *, style: str = "") -> None:
    line = Text().append(label.ljust(LABEL_WIDTH), style="dim")
    line.append(textwrap.indent(text, _INDENT).lstrip(" "), style=style)
    screen.print(line)


def _rewards(rewards: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for each in rewards:
        where = "" if each["step"] is None else f" at step {each['step']}"
        where += f" of span {each['span_id']}" if each["span_id"] else ""
        lines.append(f"{each['dimension']} = {each['value']:g}{where}")
    return lines or ["none"]


def _tokens(calls: Sequence[CallRecord]) -> str:
    if not calls:
        return "no model call"
    prompt = sum(call.usage.prompt or 0 for call in calls)
    completion = sum(call.usage.completion or 0 for call in calls)
    plural = "s" if len(calls) > 1 else ""
    return f"{prompt} prompt, {completion} completion, in {len(calls)} model call{plural}"


def _lines(call: CallRecord) -> list[str]:
    prompt, completion = ("?" if count is None else str(count) for count in (call.usage.prompt, call.usage.completion))
    lines = [f"{prompt} prompt tokens, {completion} completion tokens, status {call.status}"]
    lines += last_message(call.request)
    tools = tool_names_of(call.answer)
    if tools:
        lines.append(cut(f"assistant calls {', '.join(tools)}"))
    text = text_of(call.answer)
    return [*lines, cut(f"assistant: {text}")] if text else lines


def _cut(text: str) -> str:
    return text if len(text) <= MAX_OUTCOME else f"{text[:MAX_OUTCOME]}… ({len(text)} characters)"
