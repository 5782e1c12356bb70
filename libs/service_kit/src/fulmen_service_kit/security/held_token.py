"""A service's own token: short-lived, and replaced by a fresh one at half of its validity.

Where the token came from a file that the service may write, the fresh one is written there, so that a restart finds it.
Otherwise the service holds it in memory, and the token that it starts with must be valid at the next start, too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.secret import Secret
from fulmen_service_kit.security.tokens import RUN_ROLES, Role

REFRESHED_ROLES: Final = frozenset({Role.SERVICE, Role.RUNNER, *RUN_ROLES})
"""Roles whose tokens are refreshed: services' tokens. People's tokens end at their expiry."""

LIMIT_S: Final = 5.0
MIN_WAIT_S: Final = 1.0
MAX_WAIT_S: Final = 30.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Claims of a token, unverified: the store verifies them."""

    role: str = ""
    issued_s: float = 0.0
    expires_s: float = math.inf

    @property
    def half_s(self) -> float:
        """Half of the validity, seconds; infinite for a token that is not refreshed."""
        return (self.expires_s - self.issued_s) / 2 if self.role in REFRESHED_ROLES else math.inf


class HeldToken:
    """The token of this service; call it for the current text."""

    def __init__(
        self,
        secret: Secret,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initializes the token.

        Args:
            secret: The service's setting `token`; empty for a store in dev mode.
            clock: Unix time, seconds.
            monotonic: Seconds that only grow.

        Raises:
            StartupError: If the token has expired.
        """
        self._secret = secret
        self._clock = clock
        self._monotonic = monotonic
        self._given = secret()
        self._take(self._given, is_new=False)
        if self._times.expires_s <= clock():
            when = datetime.fromtimestamp(self._times.expires_s, UTC)
            role = self._times.role or "service"
            raise StartupError(
                f"token expired at {when:%Y-%m-%d %H:%M:%S} UTC. Issue another with `fulmen token issue --role {role}`, or "
                "where the store does not run, `fulmen token`."
            )

    def __call__(self) -> str:
        """Returns the token; a file that was replaced since takes effect."""
        given = self._secret()
        if given != self._given:
            self._given = given
            if given != self._token:
                self._take(given, is_new=False)
        return self._token

    @property
    def wait_s(self) -> float:
        """Time until the token is to be refreshed, seconds; not positive if it is due.

        The age of a token that the store has just made is known without a clock, however wrong this machine's is.
        """
        self()
        left_s = self._taken_s + self._times.half_s - self._monotonic()
        if self._is_new:
            return left_s
        return min(left_s, self._times.issued_s + self._times.half_s - self._clock())

    def replace(self, token: str) -> None:
        """Replaces the token by a fresh one, in its file, too, if this service may write it."""
        self._take(token, is_new=True)
        path = self._secret.path
        if path is not None:
            _write(path, token)

    def _take(self, token: str, *, is_new: bool) -> None:
        self._token, self._times = token, _times(token)
        self._taken_s, self._is_new = self._monotonic(), is_new

    def __repr__(self) -> str:
        return "HeldToken('**********')"


class TokenRefresher:
    """Background role: refreshes a held token at the store."""

    def __init__(self, token: HeldToken, channel: FulmenChannel) -> None:
        """Initializes the role; `channel` leads to the store and carries the token."""
        self._token = token
        self._projects = project_service_pb2_grpc.ProjectServiceStub(channel)
        self._is_failing = False

    async def run(self) -> None:
        """Refreshes the token until cancelled."""
        while True:
            # Files are replaced from outside, so no wait is long.
            await asyncio.sleep(min(max(self._token.wait_s, MIN_WAIT_S), MAX_WAIT_S))
            if self._token.wait_s <= 0:
                await self.refresh()

    async def refresh(self) -> None:
        """Refreshes the token once; keeps it on failure."""
        try:
            answer = await self._projects.RefreshToken(pb.RefreshTokenRequest(), timeout=LIMIT_S)
        except FulmenError as error:
            if not self._is_failing:
                _log.warning("token_not_refreshed", error=type(error).__name__, reason=error.reason)
            self._is_failing = True
            return
        self._is_failing = False
        self._token.replace(answer.token)
        _log.info("token_refreshed", good_until=answer.expire_time.ToJsonString())


def half_life_s(token: str) -> float:
    """Returns the time after which a token that the store has just made is to be refreshed, seconds; not verified."""
    return _times(token).half_s


def run_of(token: str) -> str:
    """Returns the training run that a token of an engine or of ranks names; empty if it names none. Not verified."""
    return str(_claims(token).get("run", ""))


def _times(token: str) -> _Times:
    claims = _claims(token)
    with suppress(ValueError, TypeError, KeyError):
        return _Times(role=str(claims["role"]), issued_s=float(claims["iat"]), expires_s=float(claims["exp"]))
    return _Times()


def _claims(token: str) -> dict[str, Any]:
    with suppress(ValueError, IndexError):
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return claims if isinstance(claims, dict) else {}
    return {}


def _write(path: Path, token: str) -> None:
    """Replaces a file of this service's own user; links, such as those of mounted Secrets, are left as they are."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_symlink() or path.stat().st_uid != os.geteuid() or not os.access(path.parent, os.W_OK):
            return
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        _log.warning("token_not_written", path=str(path), error=error.strerror)
