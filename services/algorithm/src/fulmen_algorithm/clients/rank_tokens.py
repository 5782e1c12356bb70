"""Tokens of ranks: one per project, got from the store, in a file that ranks read again when it changes.

Ranks call servers of shards, not the store. So the service refreshes their tokens as it does its own.
"""

import asyncio
import os
import time
from pathlib import Path

import structlog

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen_algorithm.clients.patience import Patience
from fulmen_service_kit.security.held_token import half_life_s

LIMIT_S = 5.0
INTERVAL_S = 5.0

_log = structlog.get_logger()


class RankTokens:
    """Background role: keeps the files' tokens fresh."""

    def __init__(self, channel: FulmenChannel, *, folder: Path, outage_limit_s: float) -> None:
        """Initializes the role.

        Args:
            channel: Channel to the store; it carries the service's own token.
            folder: Folder of the files, made when the first is needed.
            outage_limit_s: Maximum wait for the store, seconds.
        """
        self._projects = project_service_pb2_grpc.ProjectServiceStub(channel)
        self._folder = folder
        self._patience = Patience(service="store", notify=_logged, limit_s=outage_limit_s)
        # Project of each file, and the monotonic time at which its token is to be refreshed.
        self._due_s: dict[str, float] = {}

    async def file_of(self, project: str) -> Path:
        """Returns the file with a token of role service for a project; it stays fresh.

        Raises:
            Unavailable: If the store has not answered within the limit.
            FulmenError: If it refuses.
        """
        if project not in self._due_s:
            await self._patience.call(lambda: self._refresh(project))
        return self._path(project)

    async def run(self) -> None:
        """Refreshes the tokens until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            for project in [project for project, due_s in self._due_s.items() if due_s <= time.monotonic()]:
                try:
                    await self._refresh(project)
                except (FulmenError, OSError) as error:
                    _log.warning("rank_token_not_refreshed", project=project, error=type(error).__name__)

    async def _refresh(self, project: str) -> None:
        answer = await self._projects.RefreshToken(pb.RefreshTokenRequest(project=project), timeout=LIMIT_S)
        self._write(self._path(project), answer.token)
        self._due_s[project] = time.monotonic() + half_life_s(answer.token)

    def _path(self, project: str) -> Path:
        return self._folder / f"{project.rpartition('/')[2]}.token"

    def _write(self, path: Path, token: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(token)
        scratch.replace(path)


def _logged(severity: str, text: str) -> None:
    _log.info("rank_tokens_wait", severity=severity, text=text)
