"""`fulmen resources`: versioned things, such as agents, bundles, datasets, policies and routes."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer
from google.protobuf.message import DecodeError, Message

from fulmen.cli.command import Output, OutputOption, new_group, remote_command
from fulmen.cli.connection import Connection
from fulmen.cli.output import as_dict, console, print_json, print_rows, when
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import resource_pb2, resource_service_pb2

__all__ = ["register"]

PAGE_SIZE: Final = 1000
# Kinds whose content is a message of the contract.
_MESSAGES: Final[dict[str, type[Message]]] = {
    "agent": agent_spec_pb2.AgentSpec,
    "route": route_pb2.Route,
    "backend": backend_pb2.Backend,
}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    resources = new_group("Versioned resources: agents, bundles, datasets, policies, routes.")
    app.add_typer(resources, name="resources")
    remote_command(resources, "list")(list_resources)
    remote_command(resources, "show")(show)


async def list_resources(
    connection: Connection,
    resource: Annotated[str, typer.Argument(help="Lists all versions of this one.")] = "",
    kind: Annotated[str, typer.Option(help="Only this kind, such as policy.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=PAGE_SIZE, help="At most so many.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists the newest version of every resource, or all versions of one.

    Examples:

        fulmen resources list --kind policy

        fulmen resources list policy.arithmetic
    """
    request = resource_service_pb2.ListResourceVersionsRequest(
        parent=_name(resource) if resource else "", kind=kind, page_size=limit
    )
    async with connection.open() as client:
        found = list((await client.resources.ListResourceVersions(request)).resources)
    rows = [
        (each.name, each.kind, f"{each.size_bytes}", each.sha256.hex()[:12], when(each.create_time)) for each in found
    ]
    columns = ("version", "kind", "bytes", "sha256", "published (UTC)")
    print_rows(output, columns, rows, messages=found, empty="No resources.")


async def show(
    connection: Connection,
    resource: Annotated[
        str, typer.Argument(help="Such as policy.arithmetic or resources/policy.arithmetic/versions/3.")
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Writes the content as it is.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows one version with its content; of a bare name the newest.

    Examples:

        fulmen resources show agent.arithmetic

        fulmen resources show bundle.arithmetic --raw | tar tz
    """
    request = resource_service_pb2.GetResourcesRequest(names=[_name(resource)])
    async with connection.open() as client:
        found = (await client.resources.GetResources(request)).resources[0]
    if raw:
        sys.stdout.buffer.write(found.content)
        return
    content = _content(found)
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
        ("published", when(found.create_time)),
        *sorted(found.metadata.items()),
    ]
    screen = console()
    for label, value in facts:
        if value:
            screen.print(f"{label:<14}{value}", markup=False, soft_wrap=True)
    screen.print()
    screen.print(content, markup=False, soft_wrap=True)


def _name(given: str) -> str:
    return given if given.startswith("resources/") else f"resources/{given}"


def _content(version: resource_pb2.ResourceVersion) -> str:
    """Returns the content for a person: decoded if it is a message of the contract, as it is if it is text."""
    message_class = _MESSAGES.get(version.kind)
    if message_class is not None:
        try:
            return str(message_class.FromString(version.content)).rstrip()
        except DecodeError:
            return f"({version.size_bytes} bytes that are no {message_class.DESCRIPTOR.full_name})"
    try:
        return version.content.decode("utf-8").rstrip()
    except UnicodeDecodeError:
        return f"({version.size_bytes} bytes, not text; --raw writes them)"
