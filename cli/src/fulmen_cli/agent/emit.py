"""`fulmen emit`: what `fulmen.emit_*` does, for agents in a shell or any language.

Invariant: it imports little, since an agent may call it often; only what sends a span needs OpenTelemetry.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fulmen.agent import FINAL_DIMENSION, NotInAttempt
from fulmen.emit import RewardInvalid, emit_annotation, emit_message, emit_reward

__all__ = ["register"]

WRONG_INPUT = 2
NOT_DELIVERED = 1


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    emit = typer.Typer(help="Rewards and notes of the attempt that runs here, from any program.", no_args_is_help=True)
    app.add_typer(emit, name="emit")
    emit.command("reward", context_settings={"ignore_unknown_options": True})(reward)
    emit.command("annotation")(annotation)
    emit.command("message")(message)


def reward(
    value: Annotated[float, typer.Argument(help="A finite number.")],
    dimension: Annotated[
        str, typer.Option("--dimension", "-d", help="1 to 64 lower-case letters, digits, dots, - and _.")
    ] = FINAL_DIMENSION,
    step: Annotated[int | None, typer.Option("--step", "-s", help="The agent's step that it scores, from 0.")] = None,
    span: Annotated[str | None, typer.Option("--span", help="The span that it scores, 16 hexadecimal digits.")] = None,
    trace: Annotated[bool, typer.Option(help="Also make a span of it.")] = True,
) -> None:
    """Gives the attempt a reward.

    The same dimension, step and span again replaces the earlier value. Exit status 2 if it is malformed, or no attempt
    runs here.

    Example:

        fulmen emit reward 0.5 --dimension style
    """
    try:
        emit_reward(value, dimension=dimension, step=step, span=span, trace=trace)
    except (RewardInvalid, NotInAttempt) as error:
        typer.echo(f"fulmen emit: {error}", err=True)
        raise typer.Exit(WRONG_INPUT) from None
    if trace:
        _deliver()


def annotation(
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Values are JSON, or else text.")],
) -> None:
    """Notes something about the attempt.

    Example:

        fulmen emit annotation phase=plan tries=3
    """
    if any("=" not in pair or pair.startswith("=") for pair in pairs):
        typer.echo("fulmen emit: an annotation is KEY=VALUE.", err=True)
        raise typer.Exit(WRONG_INPUT)
    emit_annotation({key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)})
    _deliver()


def message(
    content: Annotated[str, typer.Argument(help="What is said.")],
    role: Annotated[str, typer.Option("--role", "-r", help="Who says it.")] = "assistant",
) -> None:
    """Notes something that was said.

    Example:

        fulmen emit message "no such file" --role tool
    """
    emit_message(content, role=role)
    _deliver()


def _deliver() -> None:
    from fulmen.tracing import flush

    # The runner is told as well, when this process ends.
    if flush():
        raise typer.Exit(NOT_DELIVERED)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
