"""The membership of a rank with one shard, and its stream.

Invariant: a payload is sent until its shard has said what became of it; sending again is harmless. Only the event loop of
the link runs any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc.aio

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.errors import DeadlineExceeded, FulmenError, Unavailable
from fulmen.rpc.channel import DuplexStream, FulmenChannel
from fulmen_algorithm.exchange.aggregator.staging import Staging
from fulmen_algorithm.exchange.aggregator.terms import CHUNK_BYTES
from fulmen_algorithm.exchange.link import ExchangeFailed

JOIN_LIMIT_S = 20.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
HEARTBEATS_PER_LEASE = 3
MAX_REPLY_BYTES = 2**30
WITH_SUM = (
    pb.SegmentVerdict.VERDICT_ACCEPTED,
    pb.SegmentVerdict.VERDICT_DUPLICATE,
    pb.SegmentVerdict.VERDICT_LATE,
)

Stream = DuplexStream[pb.ExchangeRequest, pb.ExchangeResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A payload that is to be summed.

    Attributes:
        round: Of the link.
        call: Which of the round's sums.
        bucket: From 0.
        codec: Name and version.
        settings: What the codec is told.
        data: The payload.
    """

    round: int
    call: int
    bucket: int
    codec: tuple[str, int]
    settings: pb.CallSettings
    data: bytes | bytearray = field(repr=False)

    def chunks(self, epoch: int, *, only: int | None = None) -> Iterator[pb.ExchangeRequest]:
        """Cuts it up; `only` is the offset of the one chunk that is wanted."""
        view = memoryview(self.data)
        for begin in range(0, len(view), CHUNK_BYTES) if only is None else (only,):
            data = bytes(view[begin : begin + CHUNK_BYTES])
            yield pb.ExchangeRequest(
                chunk=pb.GradientChunk(
                    membership_epoch=epoch,
                    round=self.round,
                    call=self.call,
                    bucket=self.bucket,
                    codec=self.codec[0],
                    codec_version=self.codec[1],
                    offset_bytes=begin,
                    total_bytes=len(view),
                    data=data,
                    crc32=zlib.crc32(data),
                    settings=self.settings,
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A sum.

    Attributes:
        data: It, encoded.
        accepted: Whether this rank's payload is in it.
        member_count: Members of whom it was expected.
    """

    data: bytearray = field(repr=False)
    accepted: bool
    member_count: int


@dataclass(slots=True)
class _JoinAgain(Exception):
    """The members have changed."""


class ShardClient:
    """One rank at one shard."""

    def __init__(self, channel: FulmenChannel, request: pb.JoinRequest) -> None:
        """Takes the channel to the shard's server, and what to join with; round, epoch and count are filled in."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.round = 0
        self.known_member_count = 0
        self.first_round = 0
        self._stub = GradientExchangeServiceStub(channel)
        self._request = request
        self._epoch = 0
        self._stream: Stream | None = None
        self._joining = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._is_sending = False

    @property
    def name(self) -> str:
        """Names the shard for a person."""
        return f"shard {self._request.terms.shard} of {self._request.training_run}"

    async def join(self) -> pb.JoinResponse:
        """Becomes a member, or renews the lease.

        Raises:
            FulmenError: what the server says.
        """
        async with self._joining:
            self._request.round = self.round
            self._request.membership_epoch = self._epoch
            self._request.known_member_count = self.known_member_count
            joined: pb.JoinResponse = await self._stub.Join(self._request, timeout=JOIN_LIMIT_S)
            self._epoch = joined.membership_epoch
            self.first_round = joined.first_round
            if self._beating is None:
                self._beating = asyncio.create_task(self._beat(), name="exchange-heartbeat")
            return joined

    async def sum(self, payload: Outgoing) -> Incoming:
        """Sends a payload and returns the sum that it belongs to; the caller sets the deadline.

        Raises:
            ExchangeFailed: if no waiting helps.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._attempt(payload)
            except _JoinAgain:
                with contextlib.suppress(Unavailable, DeadlineExceeded):
                    await self._join_or_fail()
                    continue
            except (Unavailable, DeadlineExceeded):
                self._drop_stream()
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            # The server may be another one, which knows nobody.
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                await self._join_or_fail()

    async def leave(self) -> None:
        """Ends the membership; a server that is away will find out by the lease."""
        if self._beating is not None:
            self._beating.cancel()
        self._drop_stream()
        request = pb.LeaveRequest(
            training_run=self._request.training_run,
            shard=self._request.terms.shard,
            rank=self._request.rank,
            incarnation=self._request.incarnation,
        )
        with contextlib.suppress(FulmenError):
            await self._stub.Leave(request, timeout=JOIN_LIMIT_S)

    def stop(self) -> None:
        """Ends what goes on without saying so, as a process that dies does."""
        if self._beating is not None:
            self._beating.cancel()
        self._drop_stream()

    async def _join_or_fail(self) -> None:
        try:
            await self.join()
        except (Unavailable, DeadlineExceeded):
            raise
        except FulmenError as error:
            raise failed(self.name, error) from error

    async def _attempt(self, payload: Outgoing) -> Incoming:
        """Sends all of a payload on the stream, and reads until its sum is there."""
        if not self._epoch:
            await self._join_or_fail()
        epoch = self._epoch
        sending: list[asyncio.Task[None]] = []
        try:
            if self._stream is None:
                self._stream = await self._opened()
            stream = self._stream
            self._is_sending = True
            sending.append(asyncio.create_task(self._send(stream, payload.chunks(epoch)), name="exchange-send"))
            return await self._read(stream, payload, epoch, sending)
        except (Unavailable, DeadlineExceeded, _JoinAgain, ExchangeFailed):
            raise
        except FulmenError as error:
            raise failed(self.name, error) from error
        finally:
            # Not cancelled: that would end the stream. What is being written is a chunk at most.
            self._is_sending = False
            for result in await asyncio.gather(*sending, return_exceptions=True):
                if isinstance(result, BaseException):
                    self._drop_stream()

    async def _opened(self) -> Stream:
        stream: Stream = self._stub.Exchange()
        opened = pb.OpenExchange(
            training_run=self._request.training_run,
            shard=self._request.terms.shard,
            rank=self._request.rank,
            incarnation=self._request.incarnation,
        )
        await stream.write(pb.ExchangeRequest(open=opened))
        return stream

    async def _send(self, stream: Stream, requests: Iterator[pb.ExchangeRequest]) -> None:
        for request in requests:
            if not self._is_sending:
                return
            self.sent_bytes += len(request.chunk.data)
            await stream.write(request)

    async def _read(self, stream: Stream, payload: Outgoing, epoch: int, sending: list[asyncio.Task[None]]) -> Incoming:
        verdict: pb.SegmentVerdict | None = None
        reply = Staging(0)
        while True:
            message = await stream.read()
            if message is grpc.aio.EOF:
                raise Unavailable("The server has closed the stream.")
            chunk = message.chunk
            about = message.verdict if message.HasField("verdict") else chunk
            if (about.round, about.call) != (payload.round, payload.call):
                continue  # of a payload that was sent again, and had its sum already
            if message.HasField("verdict"):
                verdict = self._checked(message.verdict, payload)
                if verdict is not None:
                    reply = Staging(verdict.reply_bytes)
                elif message.verdict.verdict == pb.SegmentVerdict.VERDICT_BAD_CHECKSUM:
                    again = payload.chunks(epoch, only=message.verdict.offset_bytes)
                    sending.append(asyncio.create_task(self._send(stream, again), name="exchange-send-again"))
            elif verdict is not None:
                problem = reply.problem(chunk.offset_bytes, chunk.total_bytes, len(chunk.data))
                if problem or zlib.crc32(chunk.data) != chunk.crc32:
                    # Asked for again, it comes again.
                    self._drop_stream()
                    raise Unavailable(f"A sum came damaged: {problem or 'wrong checksum'}.")
                self.received_bytes += len(chunk.data)
                reply.put(chunk.offset_bytes, chunk.data)
            if verdict is not None and reply.is_complete:
                self.known_member_count = verdict.member_count
                return Incoming(
                    data=reply.take(),
                    accepted=verdict.verdict != pb.SegmentVerdict.VERDICT_LATE,
                    member_count=verdict.member_count,
                )

    def _checked(self, verdict: pb.SegmentVerdict, payload: Outgoing) -> pb.SegmentVerdict | None:
        """Returns a verdict whose sum follows and is waited for.

        Raises:
            _JoinAgain: if the payload is to be sent in another epoch.
            ExchangeFailed: if no waiting helps.
        """
        if verdict.verdict in WITH_SUM:
            if not 0 < verdict.reply_bytes <= MAX_REPLY_BYTES:
                raise ExchangeFailed(f"{self.name} announced a sum of {verdict.reply_bytes} bytes; update its server")
            self._is_sending = False
            return verdict
        if verdict.verdict == pb.SegmentVerdict.VERDICT_STALE_EPOCH:
            raise _JoinAgain
        if verdict.verdict == pb.SegmentVerdict.VERDICT_BEHIND:
            raise ExchangeFailed(
                f"this rank is too far behind {self.name}: {verdict.text}."
                " Start it again from a newer checkpoint, or from the weights of another rank"
            )
        if verdict.verdict == pb.SegmentVerdict.VERDICT_INVALID:
            raise ExchangeFailed(
                f"{self.name} refuses a payload of round {payload.round}: {verdict.text}."
                " The ranks must run the same version with the same settings"
            )
        return None

    async def _beat(self) -> None:
        """Keeps the lease while the rank computes."""
        while True:
            await asyncio.sleep(self._request.terms.lease_s / HEARTBEATS_PER_LEASE)
            # The next call finds out whatever it is.
            with contextlib.suppress(FulmenError):
                await self.join()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None


def failed(name: str, error: FulmenError) -> ExchangeFailed:
    """Says what a refusal means for a rank."""
    listed = "".join(f"\n  {violation.field}: {violation.description}" for violation in error.violations)
    return ExchangeFailed(f"{name} refuses this rank ({error.reason}): {error.message}{listed}")
