"""Turns a function into a command: the options that all commands share are added here, and errors are reported here."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from fulmen_cli.connection import Connection
from fulmen_cli.exits import reported
from fulmen_cli.local.record import DEFAULT_STATE_DIR

__all__ = ["Output", "OutputOption", "StateDirOption", "local_command", "new_group", "remote_command", "run_at_once"]

P = ParamSpec("P")


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print the result.")]
StateDirOption = Annotated[
    Path, typer.Option("--state-dir", envvar="FULMEN_STATE_DIR", help="Folder of the local stack.")
]

_PANEL = "Where to connect"
_SHARED: dict[str, tuple[Any, Any]] = {
    "state_dir": (
        Annotated[
            Path,
            typer.Option(
                "--state-dir",
                envvar="FULMEN_STATE_DIR",
                rich_help_panel=_PANEL,
                help="Folder of the local stack to talk to.",
            ),
        ],
        Path(DEFAULT_STATE_DIR),
    ),
    "store_target": (
        Annotated[
            str | None,
            typer.Option(
                "--store-target", envvar="FULMEN_STORE_TARGET", rich_help_panel=_PANEL, help="The store, HOST:PORT."
            ),
        ],
        None,
    ),
    "algorithm_target": (
        Annotated[
            str | None,
            typer.Option(
                "--algorithm-target",
                envvar="FULMEN_ALGORITHM_TARGET",
                rich_help_panel=_PANEL,
                help="The algorithm service, HOST:PORT.",
            ),
        ],
        None,
    ),
    "llm_proxy_target": (
        Annotated[
            str | None,
            typer.Option(
                "--llm-proxy-target",
                envvar="FULMEN_LLM_PROXY_TARGET",
                rich_help_panel=_PANEL,
                help="The LLM proxy's gRPC port, HOST:PORT; several separated by commas: `proxy health` asks all, "
                "other commands the first.",
            ),
        ],
        None,
    ),
    "token": (
        Annotated[
            str | None,
            typer.Option(
                "--token",
                envvar="FULMEN_TOKEN",
                rich_help_panel=_PANEL,
                help="Token of the caller; by default that of the local stack.",
            ),
        ],
        None,
    ),
}


def new_group(help_text: str) -> typer.Typer:
    """Makes a group of commands."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode="markdown")


def local_command(app: typer.Typer, name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a command that talks to no service."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with reported():
                function(*args, **kwargs)

        app.command(name)(run)
        return run

    return register


Runner = Callable[[Callable[..., Awaitable[None]], Connection, dict[str, Any]], None]


def run_at_once(function: Callable[..., Awaitable[None]], connection: Connection, given: dict[str, Any]) -> None:
    """Runs a command in an event loop of its own."""
    asyncio.run(_awaited(function, connection, given))


def remote_command(
    app: typer.Typer, name: str, *, run_by: Runner = run_at_once
) -> Callable[[Callable[Concatenate[Connection, P], Awaitable[None]]], Callable[..., None]]:
    """Registers an asynchronous command whose first argument is the connection, made of the shared options.

    Args:
        app: where it is registered.
        name: its name.
        run_by: runs it, given its connection and its own options.
    """

    def register(function: Callable[Concatenate[Connection, P], Awaitable[None]]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in list(signature.parameters.values())[1:]]
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in _SHARED.items()
        ]

        def run(**given: Any) -> None:
            connection = Connection(**{key: given.pop(key) for key in _SHARED})
            with reported():
                run_by(function, connection, given)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # typer reads it
        app.command(name)(run)
        return run

    return register


async def _awaited(function: Callable[..., Awaitable[None]], connection: Connection, given: dict[str, Any]) -> None:
    await function(connection, **given)
