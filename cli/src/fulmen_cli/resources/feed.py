"""`fulmen resources watch`: prints what changes; a stream that breaks is opened again at the cursor."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated, Final

import typer

from fulmen.errors import Unavailable
from fulmen.store.v1 import resource_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console, when

__all__ = ["watch"]

PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5
# The store sends a keep-alive every 15 s.
SILENCE_LIMIT_S: Final = 45.0


async def watch(
    connection: Connection,
    prefix: Annotated[str, typer.Argument(help="Only resources whose ids begin so.")] = "",
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; repeat for more.")] = None,
    cursor: Annotated[str, typer.Option(help="Goes on from here, without what is there now.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Prints what is there, then every new version and every move of an alias, until it is interrupted.

    Example:

        fulmen resources watch prompt. --kind prompt
    """
    reached = time.monotonic()
    async with connection.open() as client:
        while True:
            request = resource_service_pb2.WatchResourcesRequest(kinds=kind, id_prefix=prefix, cursor=cursor)
            stream = client.resources.WatchResources(request)
            try:
                while True:
                    async with asyncio.timeout(SILENCE_LIMIT_S):
                        answer = await anext(stream, None)
                    if answer is None:
                        break
                    reached = time.monotonic()
                    _print(answer, as_json=output is Output.JSON)
                    cursor = answer.cursor or cursor
            except (Unavailable, TimeoutError):
                if time.monotonic() - reached > PATIENCE_S:
                    raise CommandFailed(
                        f"The store could not be reached for {PATIENCE_S:.0f} s; go on later with --cursor {cursor}."
                    ) from None
                await asyncio.sleep(REOPEN_WAIT_S)
            finally:
                stream.cancel()


def _print(answer: resource_service_pb2.WatchResourcesResponse, *, as_json: bool) -> None:
    if not (answer.resources or answer.aliases or answer.snapshot_complete):
        return
    if as_json:
        for version in answer.resources:
            version.ClearField("content")
        sys.stdout.write(json.dumps(as_dict(answer), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    screen = console()
    for version in answer.resources:
        line = f"{when(version.create_time)}  {version.name}  {version.kind}  {version.size_bytes} bytes"
        screen.print(line, markup=False, soft_wrap=True)
    for alias in answer.aliases:
        line = f"{when(alias.update_time)}  {alias.name} -> version {alias.version}"
        screen.print(line, markup=False, soft_wrap=True)
    if answer.snapshot_complete:
        screen.print("(this is what is there; changes follow)", markup=False)
