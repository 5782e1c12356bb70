"""Another holder of the files of a download, which is tried before the service and is not trusted.

Everything that it sends is compared with the service's manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import FulmenError, ModelNotFound

__all__ = ["Peer", "PeerFailure"]

STREAM_TIMEOUT_S: Final = 600.0
LEAST_BYTES: Final = 512 * 2**10
"""What it sends at least in the time of its patience, or else the rest of the file."""


class PeerFailure(StrEnum):
    """Failure of a peer."""

    NONE = ""
    SLOW = "slow"
    WRONG = "wrong"


class Peer:
    """One peer, for any number of consecutive downloads. After its first failure it is not used again.

    Attributes:
        received_bytes: Bytes that it has sent.
        failure: Its failure, if any.
    """

    def __init__(self, weights: WeightServiceStub, *, patience_s: float) -> None:
        """`patience_s` is the time within which it must send `LEAST_BYTES`, in seconds."""
        self._weights = weights
        self._patience_s = patience_s
        self._is_asked = True
        self.received_bytes = 0
        self.failure = PeerFailure.NONE

    async def receive(self, request: pb.DownloadChunksRequest, take: Callable[[bytes], Awaitable[None]]) -> int:
        """Passes on the bytes that it sends of a range, which may be fewer than requested.

        Args:
            request: The range, with its size.
            take: Receives the next bytes.

        Returns:
            Number of bytes that it has sent.
        """
        arrived = 0
        if not self._is_asked:
            return arrived
        now_s = asyncio.get_running_loop().time
        stream = self._weights.DownloadChunks(request, timeout=STREAM_TIMEOUT_S)
        until_s, due = now_s() + self._patience_s, LEAST_BYTES
        try:
            while arrived < request.size_bytes:
                async with asyncio.timeout_at(until_s):
                    chunk = await anext(aiter(stream), None)
                if chunk is None or arrived + len(chunk.data) > request.size_bytes:
                    self.fail(PeerFailure.SLOW if chunk is None else PeerFailure.WRONG)
                    break
                await take(chunk.data)
                arrived += len(chunk.data)
                self.received_bytes += len(chunk.data)
                if arrived >= due:
                    until_s, due = now_s() + self._patience_s, arrived + LEAST_BYTES
        except ModelNotFound:
            self._is_asked = False
        except (FulmenError, TimeoutError):
            self.fail(PeerFailure.SLOW)
        finally:
            stream.cancel()
        return arrived

    def fail(self, failure: PeerFailure) -> None:
        """Records that it has failed."""
        self._is_asked, self.failure = False, failure
