"""Connections to the other workers behind the same ports, each over its own Unix socket.

A caller's connection reaches one worker at random; that worker asks the others if a request concerns all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from fulmen.llm_proxy.v1 import (
    backend_service_pb2,
    backend_service_pb2_grpc,
)
from fulmen.rpc.channel import Token, open_channel
from fulmen_llm_proxy.settings import LlmProxySettings

_METRICS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSockets:
    """Unix sockets on which a worker serves its siblings."""

    rpc: Path
    http: Path


def sockets_of(folder: Path, index: int) -> WorkerSockets:
    """Returns the sockets of the worker with this index."""
    return WorkerSockets(rpc=folder / f"{index}.rpc", http=folder / f"{index}.http")


class Siblings:
    """Clients of the other workers."""

    def __init__(self) -> None:
        self._backends: list[backend_service_pb2_grpc.BackendServiceStub] = []
        self._sessions: list[tuple[int, aiohttp.ClientSession]] = []

    @classmethod
    async def open(cls, folder: Path, *, own_index: int, count: int, token: Token, stack: AsyncExitStack) -> Siblings:
        """Opens the clients, which connect on first use.

        Args:
            folder: folder of the workers' sockets, inaccessible to other users.
            own_index: index of this worker.
            count: number of workers.
            token: service token.
            stack: closes the clients.
        """
        siblings = cls()
        for index in range(count):
            if index == own_index:
                continue
            sockets = sockets_of(folder, index)
            channel = open_channel(f"unix:{sockets.rpc}", token=token)
            stack.push_async_callback(channel.close)
            siblings._backends.append(backend_service_pb2_grpc.BackendServiceStub(channel))
            session = aiohttp.ClientSession(
                base_url="http://sibling",
                connector=aiohttp.UnixConnector(path=str(sockets.http)),
                timeout=aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S),
            )
            stack.push_async_callback(session.close)
            siblings._sessions.append((index, session))
        return siblings

    async def health(self, *, timeout_s: float) -> list[backend_service_pb2.GetBackendHealthResponse]:
        """Returns the health of backends at every sibling; waits for one that is restarting.

        Raises:
            Unavailable, DeadlineExceeded: if a sibling does not answer in time.
        """
        request = backend_service_pb2.GetBackendHealthRequest(this_process_only=True)
        return list(
            await asyncio.gather(
                *(stub.GetBackendHealth(request, timeout=timeout_s, wait_for_ready=True) for stub in self._backends)
            )
        )

    async def metrics(self) -> dict[int, str]:
        """Returns the metrics pages of the siblings that answer, by index."""
        pages = await asyncio.gather(*(_page(session) for _, session in self._sessions))
        return {index: page for (index, _), page in zip(self._sessions, pages, strict=True) if page is not None}


async def _page(session: aiohttp.ClientSession) -> str | None:
    try:
        async with session.get("/metrics?own=1") as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None  # restarting; the next scrape includes it


def combined_instance(own: str, others: Sequence[str]) -> str:
    """Returns an id that changes whenever a worker restarts."""
    if not others:
        return own
    return hashlib.sha256("\n".join(sorted([own, *others])).encode()).hexdigest()[:32]


async def join_workers(
    settings: LlmProxySettings, token: Token, stack: AsyncExitStack
) -> tuple[Siblings, WorkerSockets] | tuple[None, None]:
    """Opens the connections to the other workers, and names this one's sockets; (None, None) with a single process."""
    if not settings.workers_dir:
        return None, None
    folder = Path(settings.workers_dir)
    siblings = await Siblings.open(
        folder, own_index=settings.worker_index, count=settings.workers, token=token, stack=stack
    )
    return siblings, sockets_of(folder, settings.worker_index)
