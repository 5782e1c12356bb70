"""`fulmen dataset`: makes data sets of recorded calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.recorded_calls import DataSet, Row, RowKind, data_set
from fulmen.row_files import writing_jsonl
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen.training.task_files import MAX_DATASET_BYTES
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import console, print_json, working

__all__ = ["register"]

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
KEYS: Final = {
    RowKind.DEMONSTRATIONS: ("demonstrations", "validation_demonstrations"),
    RowKind.TASKS: ("train", "validation"),
}
MAX_BYTES: Final = 1024 * 1024 * 1024
PAGE_SIZE: Final = 1000


class Source(StrEnum):
    """Source of rows."""

    CALLS = "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The calls that a data set is made of."""

    source: Annotated[Source, typer.Option("--from", help="Where rows come from: recorded calls of an app.")] = (
        Source.CALLS
    )
    where: Annotated[
        str, typer.Option("--filter", help="Only calls that match, such as 'model = assistant AND score > 0.5'.")
    ] = ""
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of calls that are read, the newest ones.")] = 100_000


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Data sets for train.toml, made from recorded calls of an app.")
    remote_command(group, "create")(create)
    app.add_typer(group, name="dataset")


async def create(
    connection: Connection,
    name: Annotated[str, typer.Argument(help="Name of the data set: the prefix of its files.")],
    selection: Selection,
    kind: Annotated[
        RowKind,
        typer.Option(
            "--as",
            help="Demonstrations to imitate, or tasks with the recorded answer: one for each conversation, from its longest complete call.",
        ),
    ] = RowKind.DEMONSTRATIONS,
    validation: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of the rows that are used for validation.")
    ] = 0.1,
    folder: Annotated[Path, typer.Option(help="Folder of the files; existing ones are replaced at the end.")] = Path(),
    output: OutputOption = Output.TABLE,
) -> None:
    """Writes NAME.train.jsonl and NAME.validation.jsonl, which train.toml names.

    The same prompt is always on the same side, however often the command runs.

    Examples:

        fulmen dataset create support --from calls --filter 'model = assistant AND score > 0.5'

        fulmen dataset create support --from calls --as tasks --validation 0.2
    """
    if not NAME.fullmatch(name):
        raise CommandFailed(f"{name!r} is not a valid name: use letters, digits, ., _ and -.", exit_code=Exit.USAGE)
    found = data_set(await _calls(connection, selection), kind, validation_share=validation)
    if not found.train:
        raise CommandFailed(f"No rows: {_told(found)}. No file was written.")
    for rows in (found.train, found.validation):
        size_bytes = sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in rows)
        if size_bytes > MAX_DATASET_BYTES:
            raise CommandFailed(
                f"The rows have {size_bytes} bytes, but a file for train.toml may have at most {MAX_DATASET_BYTES}: give a "
                "--filter or a smaller --limit. No file was written."
            )
    files = {}
    for key, side, rows in zip(KEYS[kind], ("train", "validation"), (found.train, found.validation), strict=True):
        if rows:
            files[key] = folder / f"{name}.{side}.jsonl"
            _write(files[key], rows)
    if output is Output.JSON:
        counts = {"train": len(found.train), "validation": len(found.validation)}
        origin = {"calls": found.calls, "conversations": found.conversations, "skipped": dict(found.skipped)}
        print_json({"files": {key: str(file) for key, file in files.items()}, "rows": counts} | origin)
        return
    screen = console()
    screen.print(
        f"{len(found.train)} {kind.value} to train on and {len(found.validation)} to validate on, of {_told(found)}.",
        markup=False,
        soft_wrap=True,
    )
    screen.print("For train.toml:\n\n[data]", markup=False)
    for key, file in files.items():
        screen.print(f'{key} = "{file.as_posix()}"', markup=False, soft_wrap=True)


async def _calls(connection: Connection, selection: Selection) -> list[call_pb2.RecordedCall]:
    request = pb.ListCallsRequest(project=connection.project, filter=selection.where, with_content=True)
    found: list[call_pb2.RecordedCall] = []
    size_bytes = 0
    async with connection.open() as client:
        with working("Reading calls ...") as update:
            while len(found) < selection.limit:
                request.page_size = min(PAGE_SIZE, selection.limit - len(found))
                page = await client.calls.ListCalls(request)
                found += page.calls
                size_bytes += page.ByteSize()
                if size_bytes > MAX_BYTES:
                    raise CommandFailed(
                        "The calls have more than 1 GiB of texts: give a --filter or a smaller --limit."
                    )
                update(f"Reading calls ... {len(found)}")
                request.page_token = page.next_page_token
                if not page.next_page_token:
                    break
    return found


def _write(file: Path, rows: list[Row]) -> None:
    try:
        with writing_jsonl(file) as writer:
            for row in rows:
                writer.write(row)
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror or error}.") from None


def _told(found: DataSet) -> str:
    skipped = "".join(f", {number} {reason.replace('_', ' ')}" for reason, number in found.skipped.items())
    return f"{found.conversations} conversations and {found.calls} calls{skipped}"
