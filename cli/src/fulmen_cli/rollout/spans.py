"""`fulmen spans`: exports spans of many rollouts to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fulmen.row_files import ExtraMissing, FileFormat, RowWriter, writing
from fulmen.rpc.services import Services
from fulmen.spans.export import SPAN_COLUMNS, SpanRows
from fulmen.store.v1 import span_service_pb2
from fulmen_cli.command import new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import rollout_names, run_name
from fulmen_cli.output import console

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    spans = new_group("Spans of many rollouts.")
    app.add_typer(spans, name="spans")
    remote_command(spans, "export")(export)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSelection:
    """The rollouts and spans to export."""

    training_run: Annotated[str, typer.Option(help="All rollouts of this training run.")] = ""
    rollout: Annotated[list[str] | None, typer.Option(help="A rollout, or one of its attempts. May be repeated.")] = (
        None
    )
    project: Annotated[str, typer.Option(help="Project of the training run; by default the token's.")] = ""
    name: Annotated[list[str] | None, typer.Option(help="Only spans with this name. May be repeated.")] = None
    name_prefix: Annotated[str, typer.Option(help="Only spans whose name has this prefix.")] = ""
    attribute: Annotated[list[str] | None, typer.Option(help="Only spans with KEY=VALUE. May be repeated.")] = None
    min_duration_s: Annotated[float | None, typer.Option(min=0, help="Minimum duration, seconds.")] = None
    errors_only: Annotated[bool, typer.Option("--errors-only", help="Only spans that failed.")] = False
    model_calls_only: Annotated[bool, typer.Option("--model-calls-only", help="Only captured model calls.")] = False


async def export(
    connection: Connection,
    out: Annotated[Path, typer.Option(help="File to write; an existing one is replaced at the end.")],
    selection: SpanSelection,
    file_format: Annotated[FileFormat, typer.Option("--format", help="JSON lines, or Parquet.")] = FileFormat.JSONL,
) -> None:
    """Exports spans to a file, one line or row per span.

    Examples:

        fulmen spans export --training-run my-run --out spans.jsonl

        fulmen spans export --training-run my-run --model-calls-only --format parquet --out calls.parquet
    """
    if bool(selection.training_run) == bool(selection.rollout):
        raise CommandFailed("Give either --training-run or --rollout.", exit_code=Exit.USAGE)
    wanted = span_service_pb2.SpanFilter(
        names=selection.name or [],
        name_prefix=selection.name_prefix,
        attributes=dict(map(_pair, selection.attribute or [])),
        errors_only=selection.errors_only,
        model_calls_only=selection.model_calls_only,
    )
    if selection.min_duration_s is not None:
        wanted.min_duration.FromNanoseconds(round(selection.min_duration_s * 1e9))
    try:
        async with connection.open() as client:
            request = span_service_pb2.StreamSpansRequest(
                parents=await rollout_names(selection.rollout or [], connection, client),
                training_run=await run_name(selection.training_run, connection, client, project=selection.project),
                project=selection.project,
                filter=wanted if wanted.ByteSize() else None,
            )
            with writing(file_format, out, SPAN_COLUMNS) as writer:
                count = await _copy(client, request, writer)
    except ExtraMissing as error:
        raise CommandFailed(str(error)) from None
    except OSError as error:
        raise CommandFailed(f"{out} cannot be written: {error.strerror or error}.") from None
    console(stderr=True).print(f"{count} spans in {out}.")


async def _copy(client: Services, request: span_service_pb2.StreamSpansRequest, writer: RowWriter) -> int:
    rows, count = SpanRows(), 0
    shown = Progress(
        SpinnerColumn(), TextColumn("{task.completed} spans"), TimeElapsedColumn(),
        console=console(stderr=True), transient=True,
    )  # fmt: skip
    with shown:
        task = shown.add_task("export", total=None)
        async for message in client.spans.StreamSpans(request):
            for chunk in message.chunks:
                for row in rows.of(chunk):
                    writer.write(row)
                    count += 1
            shown.update(task, completed=count)
    if rows.unreadable:
        console(stderr=True).print(f"{rows.unreadable} unreadable chunks were skipped.")
    return count


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise CommandFailed(f"--attribute {text!r}: must have the form KEY=VALUE.", exit_code=Exit.USAGE)
    return key, value
