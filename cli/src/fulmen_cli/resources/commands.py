"""`fulmen resources`: lists, shows and watches resources."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Final

import typer

from fulmen.errors import Unavailable
from fulmen.rpc.resource_contents import read_resources
from fulmen.store.v1 import resource_service_pb2
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.output import as_dict, console, print_json, print_json_line, print_rows, when
from fulmen_cli.resources import versions
from fulmen_cli.resources.content import resource_name, shown_content

__all__ = ["register", "watch"]

PAGE_SIZE: Final = 1000


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    resources = new_group("Versioned resources: agents, bundles, datasets, policies, routes.")
    app.add_typer(resources, name="resources")
    remote_command(resources, "list")(list_resources)
    remote_command(resources, "show")(show)
    remote_command(resources, "publish")(versions.publish)
    remote_command(resources, "diff")(versions.diff)
    remote_command(resources, "promote")(versions.promote)
    remote_command(resources, "rollback")(versions.rollback)
    remote_command(resources, "watch")(watch)


async def list_resources(
    connection: Connection,
    resource: Annotated[str, typer.Argument(help="List all versions of this resource.")] = "",
    kind: Annotated[str, typer.Option(help="Only this kind, such as policy.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=PAGE_SIZE, help="Maximum number of results.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists the newest version of every resource, or all versions of one.

    Examples:

        fulmen resources list --kind policy

        fulmen resources list policy.arithmetic
    """
    request = resource_service_pb2.ListResourceVersionsRequest(
        parent=resource_name(resource) if resource else "", kind=kind, page_size=limit
    )
    async with connection.open() as client:
        answer = await client.resources.ListResourceVersions(request)
    found, aliases = list(answer.resources), dict[int, list[str]]()
    for alias in answer.aliases:
        aliases.setdefault(alias.version, []).append(alias.name.rpartition("/")[2])
    rows = [
        (each.name, each.kind, f"{each.size_bytes}", each.sha256.hex()[:12], when(each.create_time),
         when(each.expire_time), ", ".join(aliases.get(each.version, [])))
        for each in found
    ]  # fmt: skip
    columns = ("version", "kind", "bytes", "sha256", "published (UTC)", "expires (UTC)", "aliases")
    print_rows(output, columns, rows, messages=found, empty="No resources.")


async def show(
    connection: Connection,
    resource: Annotated[
        str, typer.Argument(help="Such as policy.arithmetic or resources/policy.arithmetic/versions/3.")
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Print only the content, unchanged.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows a version and its content; by default the newest.

    Examples:

        fulmen resources show agent.arithmetic

        fulmen resources show bundle.arithmetic --raw | tar tz
    """
    async with connection.open() as client:
        (found,) = await read_resources(client.resources, [resource_name(resource)])
    if raw:
        sys.stdout.buffer.write(found.content)
        return
    content = shown_content(found)
    if output is Output.JSON:
        print_json({**as_dict(found), "content": content})
        return
    facts = [
        ("version", found.name),
        ("kind", found.kind),
        ("content type", found.content_type),
        ("size", f"{found.size_bytes} bytes"),
        ("sha256", found.sha256.hex()),
        ("made from", found.parent),
        ("needs", ", ".join(found.dependencies)),
        ("published", when(found.create_time)),
        ("expires", when(found.expire_time)),
        *sorted(found.metadata.items()),
    ]
    screen = console()
    for label, value in facts:
        if value:
            screen.print(f"{label:<14}{value}", markup=False, soft_wrap=True)
    screen.print()
    screen.print(content, markup=False, soft_wrap=True)


PATIENCE_S: Final = 180.0
REOPEN_WAIT_S: Final = 0.5
# The store sends a keep-alive every 15 s.
SILENCE_LIMIT_S: Final = 45.0


async def watch(
    connection: Connection,
    prefix: Annotated[str, typer.Argument(help="Only resources whose id has this prefix.")] = "",
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind. May be repeated.")] = None,
    cursor: Annotated[str, typer.Option(help="Resume from this cursor, without existing resources.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Prints existing resources, then new versions and moved aliases, until Ctrl-C.

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
                        f"The store was unreachable for {PATIENCE_S:.0f} s; resume with --cursor {cursor}."
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
        print_json_line(as_dict(answer))
        return
    screen = console()
    for version in answer.resources:
        line = f"{when(version.create_time)}  {version.name}  {version.kind}  {version.size_bytes} bytes"
        screen.print(line, markup=False, soft_wrap=True)
    for alias in answer.aliases:
        line = f"{when(alias.update_time)}  {alias.name} -> version {alias.version}"
        screen.print(line, markup=False, soft_wrap=True)
    if answer.snapshot_complete:
        screen.print("(end of existing resources; changes follow)", markup=False)
