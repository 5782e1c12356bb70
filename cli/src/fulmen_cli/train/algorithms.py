"""`fulmen algorithms`: the available algorithms and their settings."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import algorithm_pb2, training_run_service_pb2
from fulmen.config_reader import hint
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console, print_json, print_rows

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "algorithms")(algorithms)


async def algorithms(
    connection: Connection,
    name: Annotated[str | None, typer.Argument(help="Show the inputs and settings of this algorithm.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists the algorithms; with a name, the inputs and settings of that one.

    Examples:

        fulmen algorithms

        fulmen algorithms grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.ListAlgorithmsRequest()
        found = {each.name: each for each in (await client.training_runs.ListAlgorithms(request)).algorithms}
    if name is None:
        rows = [(each.name, "weights" if each.trains else "", each.summary) for each in found.values()]
        print_rows(output, ("algorithm", "trains", "what it does"), rows, messages=list(found.values()), empty="None.")
        return
    if name not in found:
        raise CommandFailed(f"There is no algorithm {name!r}{hint(name, list(found))}")
    if output is Output.JSON:
        print_json(as_dict(found[name]))
        return
    _print(found[name])


def _print(algorithm: algorithm_pb2.Algorithm) -> None:
    screen = console()
    screen.print(Text(f"{algorithm.name}: {algorithm.summary}"))
    for label, inputs in (
        ("needs", algorithm.required_inputs),
        ("one of", algorithm.any_of_inputs),
        ("may have", algorithm.optional_inputs),
    ):
        if inputs:
            screen.print(Text(f"{label:<10}{', '.join(inputs)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "default", "what it is"):
        table.add_column(column, overflow="fold")
    for setting in algorithm.settings:
        table.add_row(Text(setting.name), Text(setting.default_json or "–"), Text(setting.summary))
    screen.print(table)
