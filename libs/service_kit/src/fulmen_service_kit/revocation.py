"""Revoked tokens, polled every few seconds.

Invariant: a known revocation stays in force while the source is unavailable. A service that has just started knows no
revocations until it has reached the store.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2, project_service_pb2_grpc

_log = structlog.get_logger()

# A revocation takes effect within five seconds: one interval plus one slow answer.
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
        """Adds an id permanently: a list that is already in flight does not contain it."""
        self._added.add(token_id)
        self._ids |= self._added

    def replace(self, token_ids: Iterable[str]) -> None:
        """Replaces the list with a newer one."""
        self._ids = self._added.union(token_ids)


class RevocationFollower:
    """Background role: keeps `RevokedTokens` up to date."""

    def __init__(self, *, revoked: RevokedTokens, fetch: Fetch, interval_s: float = INTERVAL_S) -> None:
        """Initializes the role.

        Args:
            revoked: Updated by the role.
            fetch: Returns the ids of all revoked tokens that have not expired. Raises FulmenError.
            interval_s: Polling interval, in seconds.
        """
        self._revoked = revoked
        self._fetch = fetch
        self._interval_s = interval_s
        self._away = False

    @property
    def problem(self) -> str:
        """Problem of the last poll; empty if there was none."""
        return "store does not answer" if self._away else ""

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.follow_once()
            await asyncio.sleep(self._interval_s)

    async def follow_once(self) -> None:
        """Polls once; keeps the old list on failure."""
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
    """Returns a function that fetches revoked tokens from the store; the channel's token needs role service or admin."""
    stub = project_service_pb2_grpc.ProjectServiceStub(channel)

    async def fetch() -> Iterable[str]:
        answer = await stub.ListRevokedTokens(project_service_pb2.ListRevokedTokensRequest(), timeout=LIMIT_S)
        return list(answer.token_ids)

    return fetch
