"""`fulmen resources publish|promote|rollback|diff`: publishes, compares and promotes versions."""

from __future__ import annotations

import difflib
import mimetypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from google.protobuf.duration_pb2 import Duration
from rich.text import Text

from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, print_json
from fulmen_cli.resources.content import ContentInvalid, content_text, packed_content, resource_name

__all__ = ["diff", "promote", "publish", "rollback"]

STABLE: Final = "stable"
PAGE_SIZE: Final = 1000
_TTL: Final = re.compile(r"(\d+)([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}

AliasOption = Annotated[str, typer.Option("--alias", help="The alias to move.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of a new version."""

    kind: Annotated[str, typer.Option(help="Kind, such as prompt; the same for all versions.")]
    content_type: Annotated[str, typer.Option(help="Media type; by default from the file name.")] = ""
    needs: Annotated[list[str] | None, typer.Option(help="Version that this one depends on. May be repeated.")] = None
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE. May be repeated.")] = None
    ttl: Annotated[str, typer.Option(help="Minimum retention: 90m, 12h or 7d. By default unlimited.")] = ""
    after: Annotated[
        int | None, typer.Option(min=0, help="Publish only if this is the latest version; 0 if there must be none.")
    ] = None


async def publish(
    connection: Connection,
    resource: Annotated[str, typer.Argument(help="Such as prompt.support.")],
    file: Annotated[
        Path,
        typer.Argument(
            help="The content; - for standard input. Agents, routes and backends as JSON or text format, which is validated."
        ),
    ],
    options: PublishOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Publishes a new version and moves `latest` to it.

    Examples:

        fulmen resources publish prompt.support support.md --kind prompt

        fulmen resources publish prompt.support support.md --kind prompt --after 3 --ttl 7d

        fulmen resources publish agent.mine agent.json --kind agent
    """
    if str(file) != "-" and not file.is_file():
        raise CommandFailed(f"File {file} does not exist.", exit_code=Exit.USAGE)
    name = resource_name(resource)
    try:
        content, media_type = packed_content(
            options.kind, sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        )
    except ContentInvalid as error:
        raise CommandFailed(str(error), exit_code=Exit.USAGE) from None
    version = resource_pb2.ResourceVersion(
        name=name,
        kind=options.kind,
        content=content,
        content_type=options.content_type or media_type or mimetypes.guess_type(file.name)[0] or "",
        dependencies=[resource_name(each) for each in options.needs or ()],
        metadata=dict(_pair(each) for each in options.metadata or ()),
        ttl=_ttl(options.ttl) if options.ttl else None,
    )
    request = resource_service_pb2.PublishResourcesRequest(
        resources=[version], expected_latest_versions={} if options.after is None else {name: options.after}
    )
    async with connection.open() as client:
        published = (await client.resources.PublishResources(request)).resources[0]
    if output is Output.JSON:
        print_json(as_dict(published))
    else:
        console().print(published.name, markup=False)


async def promote(
    connection: Connection,
    resource: Annotated[str, typer.Argument(help="Such as prompt.support.")],
    version: Annotated[int, typer.Argument(min=1, help="New version of the alias.")],
    alias: AliasOption = STABLE,
    output: OutputOption = Output.TABLE,
) -> None:
    """Points an alias to a version; fails if someone else moves it at the same time.

    Example:

        fulmen resources promote prompt.support 4
    """
    async with connection.open() as client:
        current = await _alias(client, resource, alias)
        await _move(client, resource, alias, current, version, output)


async def rollback(
    connection: Connection,
    resource: Annotated[str, typer.Argument(help="Such as prompt.support.")],
    to: Annotated[int | None, typer.Option(min=1, help="Version; by default the previous one.")] = None,
    alias: AliasOption = STABLE,
    output: OutputOption = Output.TABLE,
) -> None:
    """Points an alias back to an earlier version.

    Example:

        fulmen resources rollback prompt.support
    """
    async with connection.open() as client:
        current = await _alias(client, resource, alias)
        if current is None:
            raise CommandFailed(f"{resource_name(resource)} has no alias {alias}.", exit_code=Exit.NOT_FOUND)
        target = await _version_before(client, resource, current.version) if to is None else to
        if target >= current.version:
            raise CommandFailed(
                f"{alias} points to version {current.version}; use `promote` to move it forward.", exit_code=Exit.USAGE
            )
        await _move(client, resource, alias, current, target, output)


async def diff(
    connection: Connection,
    base: Annotated[
        str, typer.Argument(help="For example prompt.support/versions/3 or prompt.support/aliases/stable.")
    ],
    target: Annotated[str, typer.Argument(help="The other version; by default the latest of the same resource.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Compares two versions line by line; JSON by value, protobuf messages by field.

    Example:

        fulmen resources diff prompt.support/aliases/stable
    """
    base = resource_name(base)
    target = resource_name(target) if target else "/".join(base.split("/")[:2])
    async with connection.open() as client:
        request = resource_service_pb2.DiffResourcesRequest(base=base, target=target)
        found = await client.resources.DiffResources(request)
        text = found.unified_diff
        if not text and not found.equal and not found.truncated:
            names = [found.base.name, found.target.name]
            answer = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=names))
            text = _diff_of_messages(*answer.resources)
    if output is Output.JSON:
        print_json({**as_dict(found), "unified_diff": text})
        return
    screen = console()
    if found.equal:
        screen.print(f"{found.base.name} and {found.target.name} are equal.", markup=False)
    for line in text.splitlines():
        screen.print(Text(line, style=_STYLES.get(line[:1], "")), soft_wrap=True)
    if found.truncated:
        screen.print("(diff truncated)", markup=False)
    if not text and not found.equal:
        for version in (found.base, found.target):
            screen.print(f"{version.name}: {version.size_bytes} bytes, sha256 {version.sha256.hex()}", markup=False)


async def _alias(client: Services, resource: str, alias: str) -> resource_pb2.ResourceAlias | None:
    request = resource_service_pb2.ListResourceVersionsRequest(parent=resource_name(resource), page_size=1)
    answer = await client.resources.ListResourceVersions(request)
    name = f"{resource_name(resource)}/aliases/{alias}"
    return next((each for each in answer.aliases if each.name == name), None)


async def _version_before(client: Services, resource: str, version: int) -> int:
    """Returns the number of the newest version before one; removed versions leave gaps."""
    token = ""
    while True:
        request = resource_service_pb2.ListResourceVersionsRequest(
            parent=resource_name(resource), page_size=PAGE_SIZE, page_token=token
        )
        answer = await client.resources.ListResourceVersions(request)
        for each in answer.resources:
            if each.version < version:
                return int(each.version)
        token = answer.next_page_token
        if not token:
            text = f"{resource_name(resource)} has no version before {version}."
            raise CommandFailed(text, exit_code=Exit.NOT_FOUND)


async def _move(
    client: Services,
    resource: str,
    alias: str,
    current: resource_pb2.ResourceAlias | None,
    version: int,
    output: Output,
) -> None:
    request = resource_service_pb2.SetAliasRequest(
        name=f"{resource_name(resource)}/aliases/{alias}", version=version, etag=current.etag if current else ""
    )
    moved = (await client.resources.SetAlias(request)).alias
    if output is Output.JSON:
        print_json(as_dict(moved))
        return
    before = "nothing" if current is None else f"version {current.version}"
    console().print(f"{moved.name}: {before} -> version {moved.version}", markup=False)


def _diff_of_messages(base: resource_pb2.ResourceVersion, target: resource_pb2.ResourceVersion) -> str:
    texts = content_text(base), content_text(target)
    if None in texts:
        return ""
    lines = [(text or "").splitlines() for text in texts]
    return "\n".join(difflib.unified_diff(lines[0], lines[1], base.name, target.name, lineterm=""))


def _pair(given: str) -> tuple[str, str]:
    key, mark, value = given.partition("=")
    if not mark or not key:
        raise CommandFailed(f"{given!r}: must have the form KEY=VALUE.", exit_code=Exit.USAGE)
    return key, value


def _ttl(given: str) -> Duration:
    match = _TTL.fullmatch(given)
    if match is None:
        raise CommandFailed(f"{given!r}: must be a duration such as 90m, 12h or 7d.", exit_code=Exit.USAGE)
    return Duration(seconds=int(match[1]) * _UNIT_S[match[2]])
