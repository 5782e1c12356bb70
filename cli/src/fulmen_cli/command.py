"""Turns functions into commands: dataclasses of options become options, errors become messages and exit statuses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fulmen_cli.connection import Connection
from fulmen_cli.exits import reported

__all__ = ["Output", "OutputOption", "StateDirOption", "local_command", "new_group", "remote_command", "run_at_once"]


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print the result.")]
StateDirOption = Annotated[
    Path, typer.Option("--state-dir", envvar="FULMEN_STATE_DIR", help="Folder of the local stack.")
]


def new_group(help_text: str) -> typer.Typer:
    """Makes a group of commands."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode="markdown")


def local_command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command that calls no service."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        return _registered(app, name, function, lambda arguments: function(**arguments))

    return register


Runner = Callable[[Callable[..., Awaitable[None]], Connection, dict[str, Any]], None]


def run_at_once(function: Callable[..., Awaitable[None]], connection: Connection, arguments: dict[str, Any]) -> None:
    """Runs a command in an event loop of its own."""
    asyncio.run(_awaited(function, connection, arguments))


def remote_command(
    app: typer.Typer, name: str, *, run_by: Runner = run_at_once
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Registers an asynchronous command whose first parameter, `connection`, comes from the shared options.

    Args:
        app: the group that it is added to.
        name: its name.
        run_by: runs it, given its connection and its own arguments.
    """

    def register(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        return _registered(
            app, name, function, lambda arguments: run_by(function, arguments.pop("connection"), arguments)
        )

    return register


def _registered(
    app: typer.Typer, name: str, function: Callable[..., Any], call: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """Adds a command to a group: a parameter that is a dataclass becomes an option for each of its fields."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    # The options of `connection` are the same for all commands, and are listed last.
    parameters.sort(key=lambda parameter: parameter.annotation is Connection)

    def run(**given: Any) -> None:
        with reported():
            call({each.name: _value(each, given) for each in parameters})

    options = [option for parameter in parameters for option in _options(parameter)]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # typer reads it
    app.command(name)(run)
    return run


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Returns what typer is shown for a parameter of a command."""
    if not is_dataclass(parameter.annotation):
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    annotations = get_type_hints(parameter.annotation, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=annotations[each.name],
        )
        for each in fields(parameter.annotation)
    ]


def _value(parameter: inspect.Parameter, given: dict[str, Any]) -> Any:
    """Returns the argument for a parameter of a command, of what typer has read."""
    if not is_dataclass(parameter.annotation):
        return given[parameter.name]
    make: Any = parameter.annotation
    return make(**{each.name: given[each.name] for each in fields(parameter.annotation)})


async def _awaited(function: Callable[..., Awaitable[None]], connection: Connection, arguments: dict[str, Any]) -> None:
    await function(connection, **arguments)
