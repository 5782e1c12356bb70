"""`fulmen proxy apply`: the backends and routes of a file, once or whenever it changes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fulmen.errors import ArgumentInvalid, FulmenError
from fulmen.llm_proxy.v1 import route_service_pb2
from fulmen.train_toml.reader import ConfigError
from fulmen.watched_file import LOOK_S, WatchedFile
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, print_json, print_json_line
from fulmen_cli.proxy.file_format import read_proxy_file

__all__ = ["apply"]


async def apply(
    connection: Connection,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Such as proxy.toml; its name identifies what it owns.")],
    watch: Annotated[bool, typer.Option("--watch", help="Apply it again whenever it changes, until Ctrl-C.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only check the file; no service is called.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what the file owns; the file itself need not exist.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Applies a file of backends and routes to the proxy: adds or replaces what it contains, deletes what it no longer contains.

    Nothing changes unless the whole file is valid. Backends and routes of other owners are not changed.

    Examples:

        fulmen proxy apply proxy.toml

        fulmen proxy apply proxy.toml --check

        fulmen proxy apply proxy.toml --watch

        fulmen proxy apply proxy.toml --delete
    """
    if watch + check + delete > 1:
        raise CommandFailed("Give one of --watch, --check and --delete, not several.", exit_code=Exit.USAGE)
    if delete:
        _show(await _sent(connection, route_service_pb2.ApplyFileRequest(file=file.name)), file, output)
        return
    content: bytes | None = None
    if watch:
        with suppress(OSError):  # reported by the reader
            content = file.read_bytes()
    request = _request(file, content)
    if check:
        counts = {"backends": len(request.backends), "routes": len(request.routes)}
        if output is Output.JSON:
            print_json(counts)
        else:
            _say(f"{file.name} is valid: {_count(counts['backends'], 'backend')}, {_count(counts['routes'], 'route')}.")
        return
    _show(await _sent(connection, request), file, output)
    if watch:
        await _watch(connection, file, output, applied=content)


async def _watch(connection: Connection, file: Path, output: Output, *, applied: bytes | None) -> None:
    """Applies every valid content that has stood in the file for one look, so that none is applied half written."""
    watched, seen, told = WatchedFile(file), applied, ""
    while True:
        await asyncio.sleep(LOOK_S)
        content = watched.content()
        if content != applied and content == seen:
            try:
                _show(await _sent(connection, _request(file, content)), file, output)
                applied, told = content, ""
            except (ConfigError, ArgumentInvalid) as error:
                _warn(f"{error}\nThe previous configuration remains in effect.")
                applied = content
            except FulmenError as error:
                if (text := f"{error} Trying again.") != told:
                    _warn(text)
                told = text
        seen = content


def _request(file: Path, content: bytes | None = None) -> route_service_pb2.ApplyFileRequest:
    read = read_proxy_file(file, content)
    return route_service_pb2.ApplyFileRequest(file=read.name, backends=read.backends, routes=read.routes)


async def _sent(
    connection: Connection, request: route_service_pb2.ApplyFileRequest
) -> route_service_pb2.ApplyFileResponse:
    async with connection.open() as client:
        return await client.routes.ApplyFile(request)


def _show(answer: route_service_pb2.ApplyFileResponse, file: Path, output: Output) -> None:
    if output is Output.JSON:
        print_json_line(as_dict(answer))
        sys.stdout.flush()
        return
    for what, names in (("added", answer.added), ("changed", answer.changed), ("deleted", answer.deleted)):
        for name in names:
            _say(f"{what:<8}{name}")
    counts = f"{len(answer.added)} added, {len(answer.changed)} changed, {len(answer.deleted)} deleted"
    _say(f"{file.name}: {counts}.")


def _say(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True)
    sys.stdout.flush()


def _warn(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
