"""Routes that the store has and this replica's table does not have yet, since another replica has just published them."""

from __future__ import annotations

import asyncio
from typing import Final

from fulmen.kinds import MODEL
from fulmen_llm_proxy.routing.codec import route_resource
from fulmen_llm_proxy.routing.resources import ResourceWriter
from fulmen_service_kit.security.token_buckets import TokenBuckets

LOOKUPS_PER_S: Final = 5.0
LOOKUPS_BURST: Final = 10.0
"""Unknown models that callers of a project may request, per second and as a burst, before only the table is consulted."""


class LateRoutes:
    """Asks the store for a model that the table does not have."""

    def __init__(self, writer: ResourceWriter, *, lookups: TokenBuckets | None = None) -> None:
        """Sets what asks the store, and how often each project may have it asked."""
        self._writer = writer
        self._lookups = TokenBuckets(per_s=LOOKUPS_PER_S, burst=LOOKUPS_BURST) if lookups is None else lookups
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def await_route(self, model: str, project: str) -> None:
        """Waits until the table is as new as the store in one route; of calls for the same model, one asks.

        Returns immediately if the project has recently requested too many unknown models.

        Raises:
            Unavailable: if the store has the route, and the table does not follow in time.
        """
        asking = self._asking.get(model)
        if asking is None:
            if not MODEL.fullmatch(model) or self._lookups.take(project):
                return
            asking = asyncio.create_task(self._writer.catch_up(route_resource(model)), name="late-route")
            self._asking[model] = asking
            asking.add_done_callback(lambda _: self._asking.pop(model))
        await asyncio.shield(asking)
