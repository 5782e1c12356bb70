"""Pages through rollouts, and completes names."""

from __future__ import annotations

from typing import Final

from fulmen import ids
from fulmen.client import Client
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.connection import Connection
from fulmen_cli.output import working

__all__ = ["PAGE_SIZE", "listed", "rollout_name"]

PAGE_SIZE: Final = 1000


async def listed(
    client: Client, request: rollout_service_pb2.ListRolloutsRequest, limit: int
) -> list[rollout_pb2.Rollout]:
    """Reads pages until `limit` rollouts or the end; a short page is not the end."""
    found: list[rollout_pb2.Rollout] = []
    with working("searching") as progress:
        while len(found) < limit:
            request.page_size = min(PAGE_SIZE, limit - len(found))
            page = await client.rollouts.ListRollouts(request)
            found += page.rollouts
            request.page_token = page.next_page_token
            progress(f"{len(found)} found")
            if not page.next_page_token:
                break
    return found


def rollout_name(given: str, connection: Connection) -> str:
    """Completes a bare UUID to the name of a rollout in the token's project; also one with `/attempts/N` behind it."""
    return given if given.startswith("projects/") else ids.rollout_name(connection.project, given)
