"""Calls the other replicas of the store: `PeerService` over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import grpc.aio

from fulmen.ids import runner_name
from fulmen.rpc.credentials import channel_credentials
from fulmen.rpc.tls import TlsFiles, TlsMaterial, TlsWatch
from fulmen.store.v1 import peer_service_pb2 as pb
from fulmen.store.v1 import peer_service_pb2_grpc
from fulmen_store.replicas.notifications import MAX_ORDERED, Notification

__all__ = [
    "PeerClient",
    "PeerUnreachableError",
]

NOTIFY_LIMIT_S: Final = 0.5

_OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class PeerClient:
    """Sends notifications; keeps one connection per address."""

    def __init__(self, token: Callable[[], str], *, tls: TlsFiles | None = None) -> None:
        """Creates a client without opening a connection; `token` returns the token to present.

        Raises:
            OSError: If a file of `tls` cannot be read.
        """
        self._token = token
        self._tls = tls
        self._watch = None if tls is None else TlsWatch(tls)
        self._channels: dict[str, tuple[grpc.aio.Channel, TlsMaterial | None]] = {}

    async def notify(self, address: str, notification: Notification) -> None:
        """Notifies the replica at an address; does not retry.

        Raises:
            PeerUnreachableError: If it did not accept the notification in time.
        """
        stub = peer_service_pb2_grpc.PeerServiceStub(await self._channel(address))
        metadata = (("authorization", f"Bearer {self._token()}"),)
        try:
            await stub.Notify(_request(notification), timeout=NOTIFY_LIMIT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise PeerUnreachableError(error.code().name) from None

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Closes the connections to all other addresses."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address)[0].close()

    async def close(self) -> None:
        """Closes every connection."""
        await self.keep_only(())

    async def _channel(self, address: str) -> grpc.aio.Channel:
        """Returns the connection to an address; opens a new one if the certificates have changed."""
        material = None if self._watch is None else self._watch.material()
        known = self._channels.get(address)
        if known is not None and known[1] is material:
            return known[0]
        if material is None or self._tls is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            options = (*_OPTIONS, *self._tls.options())
            channel = grpc.aio.secure_channel(address, channel_credentials(material), options=options)
        self._channels[address] = channel, material
        if known is not None:
            await known[0].close(NOTIFY_LIMIT_S)
        return channel


def _request(notification: Notification) -> pb.NotifyRequest:
    return pb.NotifyRequest(
        ready_projects=sorted(notification.ready),
        finished_projects=sorted(notification.finished),
        resource_projects=sorted(notification.resources),
        projects_changed=notification.projects_changed,
        ordered_runners=[runner_name(session_id) for session_id in sorted(notification.ordered)][:MAX_ORDERED],
        cancels=[
            pb.CancelHint(runner=runner_name(hint.session_id), attempt=str(hint.attempt))
            for hint in notification.cancels
        ],
    )


class PeerUnreachableError(Exception):
    """A replica did not accept a notification in time."""
