"""Spans as a tree in the terminal: each below its parent, with how long it took and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.trace.v1 import trace_pb2
from rich.text import Text
from rich.tree import Tree

__all__ = ["SpanNode", "conversation_lines", "cut", "decoded", "grow"]

MAX_TEXT: Final = 160
NANOSECONDS_PER_MS: Final = 1_000_000
_ERROR_STYLE: Final = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNode:
    """A span, and what is written below its name."""

    span: trace_pb2.Span
    lines: list[str]


def grow(branch: Tree, nodes: Iterable[SpanNode]) -> None:
    """Hangs spans below their parents; those whose parent is not there hang at the branch itself."""
    waiting = sorted(nodes, key=lambda node: node.span.start_time_unix_nano)
    grown: dict[bytes, Tree] = {}
    known = {node.span.span_id for node in waiting}
    while waiting:
        later = []
        for node in waiting:
            span = node.span
            has_parent = span.parent_span_id in known and span.parent_span_id != span.span_id
            if has_parent and span.parent_span_id not in grown:
                later.append(node)
                continue
            parent = grown[span.parent_span_id] if has_parent else branch
            grown[span.span_id] = parent.add(_label(node))
        if len(later) == len(waiting):  # Spans that are each other's parents, which only a broken writer makes.
            known = set()
        waiting = later


def conversation_lines(request: object, answer: object) -> list[str]:
    """Returns the last message of a request and the answer, each on a line."""
    lines = []
    match request:
        case {"messages": [*_, {"role": str(role), "content": str(content)}]}:
            lines.append(cut(f"{role}: {content}"))
    match answer:
        case {"choices": [{"message": {"tool_calls": [_, *_] as tool_calls}}, *_]}:
            lines.append(cut(f"assistant calls {json.dumps(tool_calls, ensure_ascii=False)}"))
        case {"choices": [{"message": {"content": str(content)}}, *_]}:
            lines.append(cut(f"assistant: {content}"))
    return lines


def decoded(content: bytes) -> object:
    """Returns what a JSON document holds; None if it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def cut(text: str) -> str:
    """Returns a text as one line that is not too long."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


def _label(node: SpanNode) -> Text:
    span = node.span
    milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / NANOSECONDS_PER_MS
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    text = Text(span.name, style=_ERROR_STYLE if failed else "")
    text.append(f"  {milliseconds:.0f} ms", style="dim")
    if failed and span.status.message:
        text.append(f"  {span.status.message[:MAX_TEXT]}", style=_ERROR_STYLE)
    if node.lines:
        text.append("\n" + "\n".join(node.lines), style="dim")
    return text
