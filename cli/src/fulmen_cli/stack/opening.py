"""`fulmen open`: the console in a browser, signed in by a code that is used once."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
import webbrowser
from enum import StrEnum
from typing import Annotated, Final

import typer

from fulmen.rpc.tls import CA_VARIABLE
from fulmen_cli.command import remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.record import StackFolder
from fulmen_cli.names import ROLLOUT_FORMS, RUN_FORMS, rollout_name, run_name
from fulmen_cli.output import console

__all__ = ["open_in_browser", "register"]

LIMIT_S: Final = 10.0
"""Time for the console's answer, seconds."""


class Page(StrEnum):
    """A page of the console; the value is its part of the address."""

    HOME = "home"
    RUN = "run"
    ROLLOUT = "rollout"
    RUNS = "runs"
    ROLLOUTS = "rollouts"
    QUEUE = "queue"
    MODELS = "models"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "open")(open_page)


async def open_page(
    connection: Connection,
    page: Annotated[Page, typer.Argument(help="The page.")] = Page.HOME,
    name: Annotated[str, typer.Argument(help=f"Of `run`: {RUN_FORMS}. Of `rollout`: {ROLLOUT_FORMS}.")] = "latest",
    console_url: Annotated[
        str | None,
        typer.Option(
            "--console-url", envvar="FULMEN_CONSOLE_URL", help="The console; by default the console of the local stack."
        ),
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print an address that signs in once within 60 s, instead of opening it.")
    ] = False,
) -> None:
    """Opens the console in a browser, signed in with your token.

    Examples:

        fulmen open

        fulmen open run latest

        fulmen open rollout 0193a2

        fulmen open queue --console-url https://fulmen.example.com
    """
    path = await _path(connection, page, name)
    open_in_browser(_url(connection, console_url), connection.bearer(), path, is_printed=print_only)


async def _path(connection: Connection, page: Page, name: str) -> str:
    """Returns the path of a page; an object's path is its name."""
    if page is Page.RUN:
        async with connection.open() as client:
            return await run_name(name, connection, client)
    if page is Page.ROLLOUT:
        async with connection.open() as client:
            return await rollout_name(name, connection, client)
    return connection.project if page is Page.HOME else f"{connection.project}/{page}"


def _url(connection: Connection, given: str | None) -> str:
    if given:
        return given.rstrip("/")
    record = StackFolder(connection.state_dir.resolve()).read_running()
    if record is None:
        raise CommandFailed(
            f"No stack is running on {connection.state_dir}: start one with `fulmen up`, or name a console with --console-url.",
            exit_code=Exit.NOT_FOUND,
        )
    return record.targets["console_http"]


def open_in_browser(url: str, token: str | None, path: str, *, is_printed: bool = False) -> None:
    """Opens a page of a console, signed in with a token by a code in the fragment, which no server and no log sees.

    Raises:
        CommandFailed: If the console cannot be reached or does not accept the token.
    """
    address = f"{url}/{path}"
    if token:
        address += f"#code={_code(url, token)}"
    if is_printed or not webbrowser.open(address):
        console().print(address, markup=False, soft_wrap=True)


def _code(url: str, token: str) -> str:
    request = urllib.request.Request(  # noqa: S310  # the person names the console
        f"{url}/session/codes", method="POST", headers={"Authorization": f"Bearer {token}"}
    )
    if request.type not in ("http", "https"):
        raise CommandFailed(
            f"{url} is not a console's address: give https://HOST or http://HOST:PORT.", exit_code=Exit.USAGE
        )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=_tls(request.type)) as answer:  # noqa: S310
            return str(json.loads(answer.read())["code"])
    except urllib.error.HTTPError as error:
        with error:
            raise CommandFailed(f"The console refused the request: {_message(error)}") from None
    except (OSError, ValueError, KeyError) as error:
        raise CommandFailed(f"The console cannot be reached at {url}: {error}") from None


def _tls(scheme: str) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=os.environ.get(CA_VARIABLE) or None) if scheme == "https" else None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"status {error.code}"
