"""Finds published scores by the name that people give: `scores.better`, or `scores.better@3`."""

from __future__ import annotations

from fulmen.client import Client
from fulmen.errors import ResourceNotFound
from fulmen.scores import KIND
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["found_scores"]


async def found_scores(client: Client, given: str) -> resource_pb2.ResourceVersion:
    """Returns the version with its content; without `@version` the latest. After `@` an alias is possible, too.

    Raises:
        CommandFailed: if there is none, or it is something else.
    """
    resource, _, version = given.removeprefix("resources/").partition("@")
    name = f"resources/{resource}"
    if version:
        name += f"/versions/{version}" if version.isdecimal() else f"/aliases/{version}"
    try:
        answer = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=[name]))
    except ResourceNotFound:
        text = f"There are no scores {given}: `fulmen rollout rescore --name {resource}` makes some."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
    found: resource_pb2.ResourceVersion = answer.resources[0]
    if found.kind != KIND:
        raise CommandFailed(f"{found.name} holds no scores: its kind is {found.kind!r}.", exit_code=Exit.USAGE)
    return found
