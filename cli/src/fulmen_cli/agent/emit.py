"""`fulmen emit`: `fulmen.emit_*` for shell scripts and other languages.

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
    emit = typer.Typer(
        help="Report rewards and annotations of the current attempt, from any program.", no_args_is_help=True
    )
    app.add_typer(emit, name="emit")
    emit.command("reward", context_settings={"ignore_unknown_options": True})(reward)
    emit.command("annotation")(annotation)
    emit.command("message")(message)


def reward(
    value: Annotated[float, typer.Argument(help="A finite number.")],
    dimension: Annotated[
        str, typer.Option("--dimension", "-d", help="1 to 64 lower-case letters, digits, dots, - and _.")
    ] = FINAL_DIMENSION,
    step: Annotated[int | None, typer.Option("--step", "-s", help="Step of the agent, from 0.")] = None,
    span: Annotated[str | None, typer.Option("--span", help="Span to score, 16 hexadecimal digits.")] = None,
    trace: Annotated[bool, typer.Option(help="Also emit a span.")] = True,
) -> None:
    """Reports a reward of the current attempt.

    A reward with the same dimension, step and span replaces the earlier one. Exit status 2 if it is malformed, or no attempt
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
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Values are JSON; anything else is text.")],
) -> None:
    """Adds an annotation to the attempt.

    Example:

        fulmen emit annotation phase=plan tries=3
    """
    if any("=" not in pair or pair.startswith("=") for pair in pairs):
        typer.echo("fulmen emit: an annotation is KEY=VALUE.", err=True)
        raise typer.Exit(WRONG_INPUT)
    emit_annotation({key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)})
    _deliver()


def message(
    content: Annotated[str, typer.Argument(help="Text of the message.")],
    role: Annotated[str, typer.Option("--role", "-r", help="Role of the author.")] = "assistant",
) -> None:
    """Records a message.

    Example:

        fulmen emit message "no such file" --role tool
    """
    emit_message(content, role=role)
    _deliver()


def _deliver() -> None:
    from fulmen.spans.tracing import flush

    # The runner learns of undelivered spans when this process exits.
    if flush():
        raise typer.Exit(NOT_DELIVERED)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
