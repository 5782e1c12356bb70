"""What a service follows of the store: revoked tokens, published keys and the time, polled every few seconds.

Invariant: a known revocation and a known key stay in force while the source is unavailable. A service that has just
started knows no revocations, and accepts no token of a role, until it has reached the store.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog
from opentelemetry import metrics

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2, project_service_pb2_grpc
from fulmen_service_kit.security.asked_attempts import Runs
from fulmen_service_kit.security.keys import PublishedKeys
from fulmen_service_kit.security.tokens import TokenVerifier

_log = structlog.get_logger()

# A revocation takes effect within five seconds: one interval plus one slow answer.
INTERVAL_S: Final = 1.5
LIMIT_S: Final = 3.0
EARLY_INTERVAL_S: Final = 1.0
"""Minimum interval between polls for tokens of unknown keys, which anybody can send."""
SKEW_WARNING_S: Final = 5.0

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
        self._polling = asyncio.Lock()
        self._polled_at_s = float("-inf")

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
        """Polls once; keeps what is known on failure."""
        async with self._polling:
            await self._poll()

    async def look_early(self) -> None:
        """Polls now, unless a poll has just been made."""
        async with self._polling:
            if time.monotonic() - self._polled_at_s >= EARLY_INTERVAL_S:
                await self._poll()

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                self._revoked.replace(await self._fetch())
        except (FulmenError, TimeoutError) as error:
            if not self._away:
                _log.warning("revoked_tokens_not_read", error=type(error).__name__)
            self._away = True
        else:
            self._away = False
        finally:
            self._polled_at_s = time.monotonic()


class FollowedClock:
    """The time of another machine's clock: its last known value plus the seconds since then by a monotonic clock.

    What is done to this machine's own clock changes nothing, except the time before the first answer.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._ahead_of_monotonic_s = wall() - monotonic()
        self._warned = False
        self.skew_s = 0.0
        """Time by which this machine's clock was ahead of the other at the last answer, seconds."""

    def __call__(self) -> float:
        """Returns the other clock's time, Unix seconds."""
        return self._monotonic() + self._ahead_of_monotonic_s

    def observe(self, there_s: float, *, took_s: float) -> float:
        """Notes the time in an answer that has just arrived; returns by how much it is ahead of what this clock said.

        Args:
            there_s: The other clock's time, Unix seconds.
            took_s: Duration of the call, which bounds the error.
        """
        before_s = self._ahead_of_monotonic_s
        self._ahead_of_monotonic_s = there_s + took_s / 2 - self._monotonic()
        self.skew_s = self._wall() - self()
        if (abs(self.skew_s) > SKEW_WARNING_S) is not self._warned:
            self._warned = not self._warned
            write = _log.warning if self._warned else _log.info
            write("clock_differs" if self._warned else "clock_agrees_again", skew_s=round(self.skew_s, 1))
        return self._ahead_of_monotonic_s - before_s


def followed_at_store(
    channel: FulmenChannel, *, keys: PublishedKeys, clock: FollowedClock, with_revoked: bool = True
) -> Fetch:
    """Returns a function that reads keys and time from the store, and returns revoked tokens.

    Args:
        channel: Channel to the store; for revoked tokens, its token needs role service or admin.
        keys: Keys that it updates.
        clock: Clock that it corrects.
        with_revoked: Whether it reads revoked tokens.
    """
    stub = project_service_pb2_grpc.ProjectServiceStub(channel)
    gauge = metrics.get_meter("fulmen.clock").create_gauge(
        "clock.skew", unit="s", description="Time by which this machine's clock is ahead of the store's."
    )

    async def fetch() -> Iterable[str]:
        begun_s = time.monotonic()
        published = await stub.ListSigningKeys(project_service_pb2.ListSigningKeysRequest(), timeout=LIMIT_S)
        keys.replace(key.public_key for key in published.keys)
        clock.observe(published.server_time.ToNanoseconds() / 1e9, took_s=time.monotonic() - begun_s)
        gauge.set(clock.skew_s)
        if not with_revoked:
            return ()
        answer = await stub.ListRevokedTokens(project_service_pb2.ListRevokedTokensRequest(), timeout=LIMIT_S)
        return list(answer.token_ids)

    return fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStore:
    """What a service knows of its store.

    Attributes:
        follower: Background role that keeps it up to date.
        verifier: Verifies tokens with it.
        clock: The store's time.
    """

    follower: RevocationFollower
    verifier: TokenVerifier
    clock: FollowedClock


def follow_store(channel: FulmenChannel, keys: PublishedKeys, *, runs: Runs | None = None) -> FollowedStore:
    """Returns what follows the store, for a service that verifies tokens itself.

    Args:
        channel: Channel to the store; its token needs role service or admin.
        keys: Keys to verify with, which are kept up to date.
        runs: Asks the store about attempts whose keys look expired; see `TokenVerifier`.
    """
    return _followed(channel, keys, runs=runs, with_revoked=True)


def follow_published_keys(channel: FulmenChannel, keys: PublishedKeys) -> FollowedStore:
    """Returns what follows only what the store shows everyone, for a service that has no token of its own.

    It distinguishes forged tokens from others. Revoked ones are refused by the services that it calls with them.

    Args:
        channel: Channel to the store, without a token.
        keys: Keys to verify with, which are kept up to date.
    """
    return _followed(channel, keys, runs=None, with_revoked=False)


def _followed(channel: FulmenChannel, keys: PublishedKeys, *, runs: Runs | None, with_revoked: bool) -> FollowedStore:
    revoked, clock = RevokedTokens(), FollowedClock()
    fetch = followed_at_store(channel, keys=keys, clock=clock, with_revoked=with_revoked)
    follower = RevocationFollower(revoked=revoked, fetch=fetch)
    verifier = TokenVerifier(keys, revoked=revoked, clock=clock, look_up=follower.look_early, runs=runs)
    return FollowedStore(follower=follower, verifier=verifier, clock=clock)
