"""`fulmen trace --follow`: the spans of a rollout as they are stored."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1 import trace_pb2
from rich.text import Text

from fulmen.errors import DeadlineExceeded, Unavailable
from fulmen.ids import parse_attempt_name, rollout_of
from fulmen.rpc.services import Services
from fulmen.spans.export import unpacked
from fulmen.store.v1 import rollout_service_pb2, span_service_pb2
from fulmen.zstd import FrameInvalid
from fulmen_cli.command import Output
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import console, enum_word, print_json_line
from fulmen_cli.printable import printable
from fulmen_cli.rollout.contents import Conversations
from fulmen_cli.rollout.figures import FIGURES, figure_cells

__all__ = ["follow"]

PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5
# The store sends a keep-alive every 15 s.
SILENCE_LIMIT_S: Final = 45.0
NANOSECONDS: Final = 1e9
Describe = Callable[[span_service_pb2.AttemptSpan, Conversations], list[str]]


async def follow(
    client: Services,
    name: str,
    output: Output,
    *,
    max_chars: int | None,
    describe: Describe,
    as_json: Callable[[span_service_pb2.AttemptSpan], dict[str, Any]],
) -> None:
    """Prints each span of a rollout or attempt as it is stored, and how the rollout ended.

    Raises:
        CommandFailed: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    screen = console()
    conversations: dict[str, Conversations] = defaultdict(lambda: Conversations(max_chars=max_chars))
    async for record in _spans(client, name):
        if output is Output.JSON:
            print_json_line(as_json(record))
            continue
        screen.print(_title(record), soft_wrap=True)
        for line in describe(record, conversations[record.attempt]):
            screen.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    if output is Output.TABLE:
        await _print_end(client, rollout_of(name))


async def _print_end(client: Services, rollout: str) -> None:
    request = rollout_service_pb2.GetRolloutRequest(name=rollout)
    ended = (await client.rollouts.GetRollout(request)).rollout
    words = [
        " ".join(filter(None, (enum_word(ended, "state"), enum_word(ended, "failure_kind")))),
        *(f"{title} {value}" for title, value in zip(FIGURES, figure_cells(ended), strict=True) if value),
    ]
    screen = console()
    screen.print(Text(", ".join(words)), soft_wrap=True)
    if ended.failure_message:
        screen.print(Text(ended.failure_message, style="red"), soft_wrap=True)


async def _spans(client: Services, name: str) -> AsyncIterator[span_service_pb2.AttemptSpan]:
    """Yields every span once, over restarts of the store."""
    chunks: set[tuple[str, str]] = set()
    spans: set[tuple[str, bytes]] = set()
    cursor = ""
    reached = time.monotonic()
    while True:
        stream = client.spans.WatchSpans(span_service_pb2.WatchSpansRequest(parent=name, cursor=cursor))
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    answer = await anext(stream, None)
                if answer is None:
                    return
                new: list[tuple[int, span_service_pb2.AttemptSpan]] = []
                for chunk in answer.chunks:
                    if (chunk.attempt, chunk.chunk_id) in chunks:
                        continue
                    chunks.add((chunk.attempt, chunk.chunk_id))
                    try:
                        records = unpacked(chunk).spans
                    except (DecodeError, FrameInvalid):
                        continue
                    for record in records:
                        span = trace_pb2.Span.FromString(record.otlp_span)
                        if (chunk.attempt, span.span_id) not in spans:
                            spans.add((chunk.attempt, span.span_id))
                            found = span_service_pb2.AttemptSpan(attempt=chunk.attempt, span=record)
                            new.append((span.start_time_unix_nano, found))
                # What came together is shown in order of time; chunk ids have none within a millisecond.
                for _, found in sorted(new, key=lambda each: each[0]):
                    yield found
                # After the spans were shown: spans that a broken stream did not show are sent again.
                cursor = answer.cursor or cursor
                # A screen that is slow for longer than the store waits has reached it, too.
                reached = time.monotonic()
        except (Unavailable, DeadlineExceeded, TimeoutError):
            if time.monotonic() - reached > PATIENCE_S:
                raise CommandFailed(f"The store was unreachable for {PATIENCE_S:.0f} s.") from None
            await asyncio.sleep(REOPEN_WAIT_S)
        finally:
            stream.cancel()


def _title(record: span_service_pb2.AttemptSpan) -> Text:
    span = trace_pb2.Span.FromString(record.span.otlp_span)
    at = time.strftime("%H:%M:%S", time.gmtime(span.start_time_unix_nano / NANOSECONDS))
    took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    text = Text(f"{at}  attempt {parse_attempt_name(record.attempt).number}  ", style="dim")
    text.append(printable(span.name), style="red" if failed else "bold")
    text.append(f"  {took_ms:.0f} ms", style="dim")
    if failed and span.status.message:
        text.append(f"  {printable(span.status.message)}", style="red")
    return text
