"""Calls the other replicas of the store: `PeerService` over gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import grpc.aio

from fulmen.ids import attempt_name
from fulmen.store.v1 import peer_service_pb2 as pb
from fulmen.store.v1 import peer_service_pb2_grpc
from fulmen_store.domain.peers import News, PeerUnreachableError

__all__ = ["GrpcPeers"]

NOTIFY_LIMIT_S: Final = 0.5
# A token is minted anew when half of its life is over.
TOKEN_TTL_S: Final = 3600.0

_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class GrpcPeers:
    """Implements `PeerClient`; keeps one connection per address."""

    def __init__(self, mint_token: Callable[[float], str], clock: Callable[[], float] = time.monotonic) -> None:
        """Takes what makes a token that is valid for so many seconds."""
        self._mint_token = mint_token
        self._clock = clock
        self._token, self._renew_at = "", 0.0
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def notify(self, address: str, news: News) -> None:
        """Tells the replica at an address, once.

        Raises:
            PeerUnreachableError: if it did not take the news in time.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        stub = peer_service_pb2_grpc.PeerServiceStub(channel)
        try:
            await stub.Notify(_request(news), timeout=NOTIFY_LIMIT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise PeerUnreachableError(error.code().name) from None

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Closes the connections to all other addresses."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Closes every connection."""
        await self.keep_only(())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._clock() >= self._renew_at:
            self._token = self._mint_token(TOKEN_TTL_S)
            self._renew_at = self._clock() + TOKEN_TTL_S / 2
        return (("authorization", f"Bearer {self._token}"),)


def _request(news: News) -> pb.NotifyRequest:
    return pb.NotifyRequest(
        ready_projects=sorted(news.ready),
        finished_projects=sorted(news.finished),
        resource_projects=sorted(news.resources),
        projects_changed=news.projects_changed,
        cancels=[
            pb.CancelHint(session_id=str(hint.session_id), attempt=attempt_name(hint.rollout_id, hint.epoch))
            for hint in news.cancels
        ],
    )
