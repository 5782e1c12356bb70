"""The command `fulmen`: puts the groups of commands together; each module registers its own."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fulmen.cli import (
    agent_commands,
    algorithm_command,
    doctor_command,
    emit_command,
    exchange_commands,
    project_commands,
    proxy_commands,
    queue_command,
    resource_commands,
    rollout_commands,
    run_commands,
    runner_commands,
    span_commands,
    stack_commands,
    support_command,
    token_command,
    trace_command,
    train_command,
    usage_command,
)

__all__ = ["app", "main"]

app = typer.Typer(
    help="Fulmen trains the AI agents that you already have.\n\n"
    "Begin with `fulmen up`, then `fulmen train examples/arithmetic/train.toml`.\n\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage or input, 3 not found, 4 in conflict with what is there.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fulmen {metadata.version('fulmen')}")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """Holds the options of the program itself."""


for module in (
    stack_commands,
    agent_commands,
    train_command,
    algorithm_command,
    run_commands,
    exchange_commands,
    rollout_commands,
    queue_command,
    runner_commands,
    trace_command,
    span_commands,
    emit_command,
    resource_commands,
    proxy_commands,
    project_commands,
    usage_command,
    token_command,
    doctor_command,
    support_command,
):
    module.register(app)


def main() -> None:
    """Runs the command line."""
    app()
