"""The command `fulmen`, assembled from the modules of each noun."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fulmen_cli.agent import check, emit
from fulmen_cli.doctor import commands as doctor_commands
from fulmen_cli.doctor import support
from fulmen_cli.exchange import commands as exchange_commands
from fulmen_cli.project import commands as project_commands
from fulmen_cli.project import tokens, usage
from fulmen_cli.proxy import commands as proxy_commands
from fulmen_cli.resources import commands as resource_commands
from fulmen_cli.rollout import backlog, spans, traces
from fulmen_cli.rollout import commands as rollout_commands
from fulmen_cli.run import commands as run_commands
from fulmen_cli.runner import commands as runner_commands
from fulmen_cli.secret import commands as secret_commands
from fulmen_cli.stack import commands as stack_commands
from fulmen_cli.train import commands as train_commands

__all__ = ["app"]

app = typer.Typer(
    help="Fulmen trains the AI agents that you already have.\n\n"
    "Begin with `fulmen up`, then `fulmen train examples/arithmetic/train.toml`.\n\n"
    "Exit status: 0 done, 1 failed, 2 invalid options or input, 3 not found, 4 conflict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fulmen {metadata.version('fulmen-cli')}")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """The options of the program itself."""


for module in (
    stack_commands,
    check,
    train_commands,
    run_commands,
    exchange_commands,
    rollout_commands,
    backlog,
    runner_commands,
    traces,
    spans,
    emit,
    resource_commands,
    proxy_commands,
    project_commands,
    usage,
    tokens,
    secret_commands,
    doctor_commands,
    support,
):
    module.register(app)
