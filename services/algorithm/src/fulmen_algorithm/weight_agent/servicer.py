"""Serves what this agent has of the run's versions, or is fetching, to other agents of the run: `WeightService.DownloadChunks`.

It is not trusted: the others have the manifest from the service.
"""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc.aio
from opentelemetry import metrics

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceServicer
from fulmen.errors import ArgumentInvalid, ModelNotFound, QuotaExceeded, TokenInvalid, Unavailable, Violation
from fulmen.ids import parse_training_run_name
from fulmen.models.files import path_problem
from fulmen.models.transfer import places_of
from fulmen_algorithm.models.file_reader import FileReader
from fulmen_algorithm.weight_agent.held import HeldVersions
from fulmen_service_kit.security.tokens import FORGED, Caller, Role

CHUNK_BYTES: Final = 256 * 2**10
MAX_STREAMS: Final = 32
ORDER_WAIT_S: Final = 3.0
"""How long a version may be requested before this agent learns of it, in seconds: less than the requester's patience."""
STALL_S: Final = 60.0
"""How long the next byte of a file may be missing here, in seconds. Who asks has less patience."""


class PeerKey:
    """The key of this process for its own `WeightService`; see `fulmen_service_kit.security.auth.Verifier`."""

    def __init__(self, training_run: str) -> None:
        """Makes a new key; `training_run` is the agent's."""
        self.text = secrets.token_urlsafe(32)
        self._caller = Caller(
            role=Role.ENGINE,
            subject="peer",
            project=parse_training_run_name(training_run).project,
            training_run=training_run,
        )

    async def prepare(self, token: str) -> None:
        """Needs nothing."""

    def verify(self, token: str) -> Caller:
        """Returns another agent of the run.

        Raises:
            TokenInvalid: if the caller does not have the key.
        """
        if not hmac.compare_digest(token.encode(errors="replace"), self.text.encode()):
            raise TokenInvalid("The key is not this agent's.", problem=FORGED)
        return self._caller

    def check(self, caller: Caller) -> None:
        """Keys last as long as their process."""


class PeerServicer(WeightServiceServicer):
    """Sends files of versions, as far as they have arrived, to agents that have the key."""

    def __init__(self, held: HeldVersions) -> None:
        self._held = held
        self._open = 0
        self._sent = metrics.get_meter("fulmen.weight_agent").create_counter(
            "fulmen.weight_agent.sent.bytes", unit="By", description="Bytes of weights sent to other agents."
        )
        self._sent.add(0)

    async def DownloadChunks(
        self, request: pb.DownloadChunksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DownloadChunksResponse]:
        """Sends a range of a file; waits for what has not arrived yet."""
        if problems := _problems(request):
            raise ArgumentInvalid("The request is malformed.", violations=problems)
        with self._counted():
            reader = await self._reader(request)
            reader.go(request.offset, request.offset + request.size_bytes)
            try:
                while reader.left_bytes:
                    change = self._held.change
                    if data := await asyncio.to_thread(reader.next, CHUNK_BYTES):
                        self._sent.add(len(data))
                        yield pb.DownloadChunksResponse(data=data)
                    elif reader.is_removed:
                        raise Unavailable("The file was dropped meanwhile.")
                    else:
                        await _within(change, STALL_S)
            finally:
                await asyncio.to_thread(reader.close)

    async def _reader(self, request: pb.DownloadChunksRequest) -> FileReader:
        """Waits until a file begins to arrive, if it will."""
        until_s = asyncio.get_running_loop().time() + ORDER_WAIT_S
        while True:
            change = self._held.change
            if (folder := self._held.folder(request.source)) is not None:
                for place in places_of(folder, request.path):
                    with suppress(OSError):
                        return FileReader(place)
                await _within(change, STALL_S)
            else:
                left_s = until_s - asyncio.get_running_loop().time()
                if left_s <= 0 or not self._held.is_ahead(request.source):
                    raise ModelNotFound("The agent does not have these weights.")
                with suppress(Unavailable):
                    await _within(change, left_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._open >= MAX_STREAMS:
            raise QuotaExceeded(f"The agent sends {MAX_STREAMS} files at the same time.", quota="transfers")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


async def _within(change: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await change.wait()
    except TimeoutError:
        raise Unavailable(f"No data arrived for {limit_s:.0f} s.") from None


def _problems(request: pb.DownloadChunksRequest) -> list[Violation]:
    found = []
    if request.source.WhichOneof("source") != "policy_version":
        found.append(Violation(field="source", description="must name a policy version"))
    if path_problem(request.path):
        found.append(Violation(field="path", description="is not a file of the version"))
    if request.offset < 0 or request.size_bytes < 1:
        found.append(Violation(field="size_bytes", description="must be at least 1, and the offset at least 0"))
    return found
