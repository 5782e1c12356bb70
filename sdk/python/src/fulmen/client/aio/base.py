"""What the parts of the asynchronous client share: services, project, and reading of pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fulmen import ids
from fulmen.client.view import Named, name_of
from fulmen.rpc.services import Services

__all__ = ["Part", "Session", "listed"]

PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The services and the project in which short names are looked up, `projects/{project}`."""

    services: Services
    project: str

    def rollout(self, given: str | Named) -> str:
        """Completes the UUID of a rollout to its name."""
        name = name_of(given)
        return name if name.startswith("projects/") else ids.rollout_name(self.project, name)

    def run(self, given: str | Named | None) -> str:
        """Completes the id of a training run to its name; None becomes empty."""
        name = name_of(given) if given else ""
        return name if not name or name.startswith("projects/") else ids.training_run_name(self.project, name)


class Part:
    """A part of the client."""

    def __init__(self, session: Session) -> None:
        """Keeps the session."""
        self._session = session

    @property
    def _services(self) -> Services:
        return self._session.services


async def listed(
    call: Callable[[Any], Awaitable[Any]], request: Any, field: str, limit: int | None = None
) -> AsyncIterator[Any]:
    """Yields the results of a list, page by page; a page may be short or empty although more follow.

    Args:
        call: the rpc.
        request: its request, with `page_size` and `page_token`, which are changed.
        field: the field of the response that holds the results.
        limit: maximum number of results; None for all.
    """
    left = limit
    while left is None or left > 0:
        request.page_size = PAGE_SIZE if left is None else min(PAGE_SIZE, left)
        page = await call(request)
        found = getattr(page, field)
        for each in found:
            yield each
        left = None if left is None else left - len(found)
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return
