"""Which tokens were revoked, as a service last heard it; followed by asking every few seconds.

Invariant: what was once heard to be revoked stays so while the source is away. A service that has just started and
cannot reach the store knows of no revocation until it can.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2, project_service_pb2_grpc

_log = structlog.get_logger()

# A revocation is known everywhere within five seconds: one interval, and one answer that came late.
INTERVAL_S: Final = 1.5
LIMIT_S: Final = 3.0

Fetch = Callable[[], Awaitable[Iterable[str]]]


class RevokedTokens:
    """The ids of revoked tokens."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._added: set[str] = set()

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._ids

    def add(self, token_id: str) -> None:
        """Adds one at once and for good: a list that was on its way already does not have it."""
        self._added.add(token_id)
        self._ids |= self._added

    def replace(self, token_ids: Iterable[str]) -> None:
        """Takes a newer list."""
        self._ids = self._added.union(token_ids)


class RevocationFollower:
    """Background role: keeps `RevokedTokens` up to date."""

    def __init__(self, *, revoked: RevokedTokens, fetch: Fetch, interval_s: float = INTERVAL_S) -> None:
        """Wires the role.

        Args:
            revoked: Is kept up to date.
            fetch: Returns the ids of all revoked tokens that have not expired, or raises a FulmenError.
            interval_s: How often it is asked, in seconds.
        """
        self._revoked = revoked
        self._fetch = fetch
        self._interval_s = interval_s
        self._away = False

    @property
    def problem(self) -> str:
        """What is wrong with the source, as last seen; empty if nothing is."""
        return "it does not answer" if self._away else ""

    async def run(self) -> None:
        """Follows until it is cancelled."""
        while True:
            await self.follow_once()
            await asyncio.sleep(self._interval_s)

    async def follow_once(self) -> None:
        """Reads the list; keeps the old one if it cannot be read."""
        try:
            async with asyncio.timeout(LIMIT_S):
                self._revoked.replace(await self._fetch())
        except (FulmenError, TimeoutError) as error:
            if not self._away:
                _log.warning("revoked_tokens_not_read", error=type(error).__name__)
            self._away = True
        else:
            self._away = False


def revoked_at_store(channel: FulmenChannel) -> Fetch:
    """Returns what asks the store for revoked tokens; the channel's token needs the role service or admin."""
    stub = project_service_pb2_grpc.ProjectServiceStub(channel)

    async def fetch() -> Iterable[str]:
        answer = await stub.ListRevokedTokens(project_service_pb2.ListRevokedTokensRequest(), timeout=LIMIT_S)
        return list(answer.token_ids)

    return fetch
