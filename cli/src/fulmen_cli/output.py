"""Prints results: tables for people, JSON for programs. JSON is the protobuf mapping, so names agree with the contract."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fulmen.messages import enum_word
from fulmen_cli.command import Output
from fulmen_cli.printable import printable

__all__ = [
    "as_dict",
    "console",
    "enum_word",
    "print_json",
    "print_json_line",
    "print_rows",
    "prints_beside",
    "quieten_runner",
    "when",
    "working",
]

WIDTH_WITHOUT_TERMINAL: Final = 400
WIDEST: Final = 10_000


class _Screen(Console):
    """A console that shows all texts as they are: brackets are no markup, and control characters reach no terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console(*, stderr: bool = False) -> Console:
    """Returns a console on the current standard output, or error; without a terminal, lines are not wrapped."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else WIDTH_WITHOUT_TERMINAL
    return _Screen(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def as_dict(message: Message) -> dict[str, Any]:
    """Returns a message as JSON-ready values, with proto field names."""
    values: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return values


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_json_line(value: Any) -> None:
    """Prints a value as one line of JSON, without buffering: a program reads it while the command continues."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_rows(
    output: Output,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    messages: Sequence[Message],
    empty: str,
    right: Collection[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Prints a list: the messages as JSON, or a table, or `empty`.

    Args:
        output: How it is printed.
        columns: Titles of the columns.
        rows: The cells of each row.
        messages: The messages.
        empty: What is printed if there are none.
        right: Titles of the columns of numbers.
        spare: Titles of columns that a table is printed without if the screen is too narrow for it, the first ones first.
    """
    if output is Output.JSON:
        print_json([as_dict(message) for message in messages])
        return
    if not messages:
        console().print(empty)
        return
    screen, cells = console(), [list(map(str, row)) for row in rows]
    left = list(columns)
    for title in (*spare, None):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in left:
            table.add_column(column, overflow="fold", justify="right" if column in right else "left")
        for row in cells:
            table.add_row(*(Text(cell) for column, cell in zip(columns, row, strict=True) if column in left))
        if title is None or _width(screen, table) <= screen.width:
            break
        left.remove(title)
    screen.print(table)


def _width(screen: Console, table: Table) -> int:
    """Returns the width that a table has if nothing is wrapped."""
    return Measurement.get(screen, screen.options.update_width(WIDEST), table).maximum


def when(time: Timestamp) -> str:
    """Formats a time in UTC; empty if unset."""
    return "" if not time.seconds else time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows progress on standard error, if that is a terminal; yields a function that updates the text."""
    with console(stderr=True).status(text) as status:
        yield status.update


def quieten_runner() -> None:
    """Sends the runner's logs to standard error, warnings and above only."""
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def prints_beside(output: Output) -> AbstractContextManager[Any]:
    """Redirects prints to standard error while standard output is a JSON document."""
    return redirect_stdout(sys.stderr) if output is Output.JSON else nullcontext()
