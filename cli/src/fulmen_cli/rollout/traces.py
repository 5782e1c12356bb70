"""`fulmen trace`: the spans of a rollout as a tree in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from opentelemetry.proto.trace.v1 import trace_pb2
from rich.text import Text
from rich.tree import Tree

from fulmen.ids import parse_attempt_name
from fulmen.model_call import ENTRY_BYTES, ModelCallInvalid, read_model_call
from fulmen.store.v1 import span_service_pb2
from fulmen.type.v1 import model_call_pb2
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.names import ROLLOUT_FORMS, rollout_name
from fulmen_cli.output import as_dict, console, print_json
from fulmen_cli.printable import printable
from fulmen_cli.rollout.contents import MAX_MESSAGE_CHARS, Conversations
from fulmen_cli.rollout.following import follow as follow_spans

__all__ = ["SpanNode", "cut", "grow", "last_message", "register"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "trace")(trace)


async def trace(
    connection: Connection,
    rollout: Annotated[str, typer.Argument(help=f"{ROLLOUT_FORMS}; followed by /attempts/N for one attempt.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show spans as they are stored, until the rollout ends.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long messages in full.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the spans of a rollout as a tree, with tokens, policy versions and contents of model calls.

    For each model call it shows the messages that are new in the conversation, the tools that the model calls, and
    its answer. Attempt keys and secrets of agents are masked before spans are stored.

    Examples:

        fulmen trace 0192f0c1-7a6e-7c53-9f3e-0123456789ab

        fulmen trace latest --follow
    """
    found: list[span_service_pb2.AttemptSpan] = []
    max_chars = None if full else MAX_MESSAGE_CHARS
    async with connection.open() as client:
        name = await rollout_name(rollout, connection, client)
        if follow:
            await follow_spans(client, name, output, max_chars=max_chars, describe=_lines, as_json=_as_json)
            return
        request = span_service_pb2.ListSpansRequest(parent=name, page_size=PAGE_SIZE)
        while True:
            page = await client.spans.ListSpans(request)
            found += page.spans
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    if output is Output.JSON:
        print_json([_as_json(each) for each in found])
    elif not found:
        console().print(f"{name} has no spans.")
    else:
        console().print(_tree(name, found, max_chars))


def _tree(name: str, spans: list[span_service_pb2.AttemptSpan], max_chars: int | None) -> Tree:
    root = Tree(Text(name, style="bold"))
    by_attempt: dict[str, list[span_service_pb2.AttemptSpan]] = defaultdict(list)
    for span in spans:
        by_attempt[span.attempt].append(span)
    for attempt, members in by_attempt.items():
        branch = root.add(Text(f"attempt {parse_attempt_name(attempt).number}", style="bold"))
        said = Conversations(max_chars=max_chars)
        grow(
            branch,
            [SpanNode(span=trace_pb2.Span.FromString(e.span.otlp_span), lines=_lines(e, said)) for e in members],
        )
    return root


def _lines(record: span_service_pb2.AttemptSpan, said: Conversations) -> list[str]:
    if not record.span.model_call:
        return []
    try:
        call = read_model_call(record.span)
    except ModelCallInvalid as error:
        return [f"its record cannot be read: {error}"]
    prompt, completion = (len(packed) // ENTRY_BYTES for packed in (call.prompt, call.completion))
    versions = ", ".join(str(each.version) for each in call.versions)
    words = [f"{call.model}: {prompt} prompt tokens, {completion} completion tokens, {call.finish_reason}"]
    if call.policy:
        words.append(f"policy {call.policy} version {versions or '?'}")
    if not call.usable:
        words.append(f"not usable: {call.unusable_reason}")
    return [printable("; ".join(words)), *said.lines(call)]


def _as_json(record: span_service_pb2.AttemptSpan) -> dict[str, object]:
    found: dict[str, object] = {
        "attempt": record.attempt,
        "scope": record.span.scope,
        "span": as_dict(trace_pb2.Span.FromString(record.span.otlp_span)),
    }
    if record.span.model_call:
        found["model_call"] = as_dict(model_call_pb2.ModelCallRecord.FromString(record.span.model_call))
    return found


MAX_TEXT: Final = 160
NANOSECONDS_PER_MS: Final = 1_000_000
_ERROR_STYLE: Final = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNode:
    """A span and the lines below its name."""

    span: trace_pb2.Span
    lines: list[str]


def grow(branch: Tree, nodes: Iterable[SpanNode]) -> None:
    """Adds spans below their parents; spans without a known parent go to the branch itself."""
    ordered = sorted(nodes, key=lambda node: node.span.start_time_unix_nano)
    known = {node.span.span_id for node in ordered} - {b""}
    below: dict[bytes, list[SpanNode]] = {}
    for node in ordered:
        parent_id = node.span.parent_span_id
        has_parent = parent_id in known and parent_id != node.span.span_id
        below.setdefault(parent_id if has_parent else b"", []).append(node)
    growing = [(branch, b"")]
    while growing:
        parent, span_id = growing.pop()
        growing += [(parent.add(_label(node)), node.span.span_id) for node in below.pop(span_id, ())]
    # Spans that are each other's parents, which only a broken writer makes.
    for node in (node for nodes in below.values() for node in nodes):
        branch.add(_label(node))


def last_message(request: object) -> list[str]:
    """Returns the last message of a request as one line; nothing if it has no text."""
    match request:
        case {"messages": [*_, {"role": str(role), "content": str(content)}]}:
            return [cut(f"{role}: {content}")]
    return []


def cut(text: str) -> str:
    """Returns a text as one line, truncated."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


def _label(node: SpanNode) -> Text:
    span = node.span
    milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / NANOSECONDS_PER_MS
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    text = Text(printable(span.name), style=_ERROR_STYLE if failed else "")
    text.append(f"  {milliseconds:.0f} ms", style="dim")
    if failed and span.status.message:
        text.append(f"  {printable(span.status.message[:MAX_TEXT])}", style=_ERROR_STYLE)
    if node.lines:
        text.append("\n" + "\n".join(node.lines), style="dim")
    return text
