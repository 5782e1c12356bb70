"""The membership of a rank at one shard, and its stream.

Invariants: a payload is resent until its shard has reported its status, and resending is harmless; payloads are sent in the
order of their calls. Everything here runs on the link's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import grpc.aio
import structlog

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.errors import DeadlineExceeded, FulmenError, Unavailable
from fulmen.rpc.channel import FulmenChannel
from fulmen_exchange.aggregator.checksum import crc32
from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.staging import BufferPool, StagedPayload, Staging
from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.grpc_chunks import ChunkedPayload, ReadChunk
from fulmen_exchange.links.grpc_server import ShardServer, Stream

_log = structlog.get_logger()

JOIN_TIMEOUT_S = 20.0
INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
HEARTBEATS_PER_LEASE = 3
MAX_REPLY_BYTES = 2**30
SPARE = 4
OUTDATED = -1
"""Epoch of a payload that must not be sent further."""
WITH_SUM = (
    pb.SegmentStatus.STATUS_ACCEPTED,
    pb.SegmentStatus.STATUS_DUPLICATE,
    pb.SegmentStatus.STATUS_LATE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A payload to be summed.

    Attributes:
        round: Round of the link.
        call: Index of the sum within the round.
        bucket: Index of the bucket, from 0.
        codec: Name and version.
        settings: Per-call settings of the codec.
        payload: The payload; its memory does not change until the sum arrives.
    """

    round: int
    call: int
    bucket: int
    codec: tuple[str, int]
    settings: pb.CallSettings
    payload: ChunkedPayload = field(repr=False)

    @property
    def key(self) -> Key:
        """Round and call of the sum."""
        return self.round, self.call

    def messages(self, epoch: int, *, only: int | None = None) -> Iterator[tuple[bytes, int]]:
        """Yields the messages of its chunks with the size of their data.

        Args:
            epoch: Epoch of the membership.
            only: Index of a single chunk; None for all.
        """
        head = pb.GradientChunk(
            membership_epoch=epoch,
            round=self.round,
            call=self.call,
            bucket=self.bucket,
            codec=self.codec[0],
            codec_version=self.codec[1],
            settings=self.settings,
        )
        for number in range(len(self.payload.pieces)) if only is None else (only,):
            yield self.payload.message(head, number), sum(map(len, self.payload.pieces[number]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A sum.

    Attributes:
        sum: The encoded sum.
        accepted: Whether it includes this rank's payload.
        member_count: Members of which it was expected.
        contributor_count: Members whose payloads it includes.
    """

    sum: StagedPayload
    accepted: bool
    member_count: int
    contributor_count: int

    @property
    def factor(self) -> float:
        """Factor that scales the sum to all members."""
        return self.member_count / max(1, self.contributor_count)


@dataclass(slots=True, eq=False)
class _Awaited:
    """A payload that waits for its sum, with the epoch of its last transmission and the status of its sum."""

    payload: Outgoing
    result: asyncio.Future[Incoming]
    epoch: int = 0
    status: pb.SegmentStatus | None = None
    reply: Staging | None = None

    def begin_again(self) -> None:
        self.status, self.reply = None, None

    @property
    def is_wanted(self) -> bool:
        """Whether the shard still wants the payload."""
        return self.status is None and not self.result.done()


class _Orders:
    """Payloads to send, those of earlier calls first: a server makes sums in order and skips none that it knows of."""

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[Key, int, _Awaited, int | None]] = asyncio.PriorityQueue()
        self._numbers = count()

    def put(self, awaited: _Awaited, only: int | None = None) -> None:
        """Adds a payload, or a single one of its chunks."""
        self._queue.put_nowait((awaited.payload.key, next(self._numbers), awaited, only))

    async def next(self) -> tuple[_Awaited, int | None]:
        """Waits for a payload; returns it with the index of the chunk, or None for all."""
        *_, awaited, only = await self._queue.get()
        return awaited, only


class ShardClient:
    """A rank's connection to one shard."""

    def __init__(self, channels: Mapping[str, FulmenChannel], request: pb.JoinRequest) -> None:
        """Sends nothing yet.

        Args:
            channels: Channels by address, to the shard's server and then to those that may take its place.
            request: Request to join; updated with what the rank learns.
        """
        self.sent_bytes = 0
        self.received_bytes = 0
        self.first_round = 0
        self._servers = [ShardServer.at(address, channel) for address, channel in channels.items()]
        self._server = self._server_of_history = self._servers[0]
        self._request = request
        # This rank has all earlier sums. A single value, since `begin` is called from another thread.
        self._place: Key = (0, 0)
        # The position after the newest sum received. An older one may have been lost with its stream.
        self._received: Key = (0, 0)
        self._joining = asyncio.Lock()
        self._is_joined = False
        self._awaited: dict[Key, _Awaited] = {}
        self._something_awaited = asyncio.Event()
        self._orders: _Orders | None = None
        self._has_heard = False
        self._away_since: float | None = None
        self._pool = BufferPool(SPARE)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The shard's name in messages."""
        return f"shard {self._request.terms.shard} of {self._request.training_run}"

    def begin(self, round_: int) -> None:
        """Begins a round; this rank has all sums of earlier rounds."""
        self._place = round_, 0

    async def join(self) -> pb.JoinResponse:
        """Joins, or renews the lease.

        Raises:
            FulmenError: the server's error.
        """
        async with self._joining:
            # A sum that this rank has must not be made again, even if it still lacks an earlier one.
            position = max(min(self._awaited, default=self._place), self._received)
            self._request.round, self._request.call = position
            server = self._server
            joined: pb.JoinResponse = await server.stub.Join(self._request, timeout=JOIN_TIMEOUT_S)
            await self._refuse_stranger(server, joined)
            self._request.membership_epoch = joined.membership_epoch
            self._request.history, self._server_of_history = joined.history, server
            self.first_round = joined.first_round
            self._is_joined = True
            if not self._tasks:
                self._tasks = [
                    asyncio.create_task(self._heartbeat(), name="exchange-heartbeat"),
                    asyncio.create_task(self._serve(), name="exchange-stream"),
                ]
            return joined

    def try_next(self) -> None:
        """Calls the next of the servers from now on, after one that does not answer."""
        if len(self._servers) > 1:
            self._server = self._servers[(self._servers.index(self._server) + 1) % len(self._servers)]
            _log.info("exchange_server_tried", shard=self.name, rank=self._request.rank, address=self._server.address)

    async def _refuse_stranger(self, server: ShardServer, joined: pb.JoinResponse) -> None:
        """Leaves another server that does not have the sums of this exchange: what it would sum does not follow from them.

        Raises:
            Unavailable: if it is one.
        """
        ours = self._request.history
        if server is self._server_of_history or not ours or joined.history == ours:
            return
        _log.warning("exchange_spare_without_sums", shard=self.name, rank=self._request.rank, address=server.address)
        await self._leave(server)
        raise Unavailable(f"{server.address} does not have the sums of this exchange.")

    async def sum(self, payload: Outgoing) -> Incoming:
        """Sends a payload and returns its sum; the caller sets the deadline.

        Raises:
            ExchangeFailed: if retrying cannot help.
        """
        awaited = self._awaited[payload.key] = _Awaited(payload, asyncio.get_running_loop().create_future())
        self._place = payload.round, max(self._place[1], payload.call + 1)
        if self._orders is not None:
            self._orders.put(awaited)
        self._something_awaited.set()
        try:
            return await awaited.result
        finally:
            self._awaited.pop(payload.key, None)

    def recycle(self, staged: StagedPayload) -> None:
        """Reuses the memory of a sum that is no longer read."""
        self._pool.give(staged.buffer)

    async def leave(self) -> None:
        """Ends the membership; an unreachable server notices when the lease expires."""
        self.stop()
        await self._leave(self._server)

    async def _leave(self, server: ShardServer) -> None:
        request = pb.LeaveRequest(
            training_run=self._request.training_run,
            shard=self._request.terms.shard,
            rank=self._request.rank,
            incarnation=self._request.incarnation,
        )
        with contextlib.suppress(FulmenError):
            await server.stub.Leave(request, timeout=JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Stops without leaving, like a process that dies."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self) -> None:
        """Keeps a stream open while sums are awaited."""
        backoff_s = INITIAL_BACKOFF_S
        while True:
            while not self._awaited:
                self._something_awaited.clear()
                await self._something_awaited.wait()
            try:
                if not self._is_joined:
                    await self._join_or_fail()
                await self._run_stream()
            except (Unavailable, DeadlineExceeded) as error:
                self._note_away(error)
                # The server may have restarted and forgotten its members.
                self._is_joined = False
                if not self._has_heard:
                    self.try_next()
                backoff_s = INITIAL_BACKOFF_S if self._has_heard else min(MAX_BACKOFF_S, backoff_s * 2)
                self._has_heard = False
                await asyncio.sleep(backoff_s)
            except ExchangeFailed as error:
                self._fail(error)
            except FulmenError as error:
                self._fail(failed(self.name, error))

    def _note_away(self, error: FulmenError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("exchange_server_away", shard=self.name, rank=self._request.rank, reason=error.message)

    def _note_back(self) -> None:
        if self._away_since is not None:
            away_s, self._away_since = round(time.monotonic() - self._away_since, 1), None
            _log.warning("exchange_server_back", shard=self.name, rank=self._request.rank, away_s=away_s)

    def _fail(self, error: ExchangeFailed) -> None:
        for awaited in list(self._awaited.values()):
            if not awaited.result.done():
                awaited.result.set_exception(error)
        self._awaited = {}

    async def _join_or_fail(self) -> None:
        try:
            await self.join()
        except (Unavailable, DeadlineExceeded):
            raise
        except FulmenError as error:
            raise failed(self.name, error) from error

    async def _run_stream(self) -> None:
        """Opens a stream, sends everything awaited and reads until it breaks."""
        stream: Stream = self._server.open_stream()
        orders = self._orders = _Orders()
        for awaited in list(self._awaited.values()):
            awaited.begin_again()
            orders.put(awaited)
        both = (
            asyncio.create_task(self._send(stream, orders), name="exchange-send"),
            asyncio.create_task(self._listen(stream, orders), name="exchange-listen"),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._orders = None
            stream.cancel()
            for task in both:
                task.cancel()
            ended = await asyncio.gather(*both, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, Exception)]
        raise next((error for error in errors if isinstance(error, ExchangeFailed)), None) or (
            errors[0] if errors else Unavailable("The stream was cancelled.")
        )

    async def _send(self, stream: Stream, orders: _Orders) -> None:
        opened = pb.OpenExchange(
            training_run=self._request.training_run,
            shard=self._request.terms.shard,
            rank=self._request.rank,
            incarnation=self._request.incarnation,
        )
        await stream.write(pb.ExchangeRequest(open=opened))
        while True:
            awaited, only = await orders.next()
            if only is None:
                awaited.epoch = self._request.membership_epoch
            epoch = awaited.epoch
            for message, size in awaited.payload.messages(epoch, only=only):
                if not awaited.is_wanted or awaited.epoch != epoch:
                    break
                self.sent_bytes += size
                await stream.write(message)

    async def _listen(self, stream: Stream, orders: _Orders) -> None:
        while True:
            message = await stream.read()
            if message is grpc.aio.EOF:
                raise Unavailable("The server closed the stream.")
            self._has_heard = True
            self._note_back()
            if isinstance(message, ReadChunk) and not message.has_intact_head:
                # Reconnecting requests it again.
                raise Unavailable("Received a damaged sum: wrong checksum of a head.")
            subject = message.head if isinstance(message, ReadChunk) else message.status
            awaited = self._awaited.get((subject.round, subject.call))
            if awaited is None or awaited.result.done():
                continue  # duplicate of a sum already received
            if isinstance(message, ReadChunk):
                self._take(awaited, message)
            elif message.status.status in WITH_SUM:
                self._expect(awaited, message.status)
            elif message.status.status == pb.SegmentStatus.STATUS_BAD_CHECKSUM:
                orders.put(awaited, message.status.offset_bytes // CHUNK_BYTES)
            elif message.status.status == pb.SegmentStatus.STATUS_STALE_EPOCH:
                if awaited.epoch < message.status.membership_epoch:  # otherwise it has been resent since
                    awaited.epoch = OUTDATED
                    if self._request.membership_epoch < message.status.membership_epoch:
                        await self._join_or_fail()
                    orders.put(awaited)
            else:
                awaited.result.set_exception(self._refusal(awaited, message.status))

    def _expect(self, awaited: _Awaited, status: pb.SegmentStatus) -> None:
        if not 0 < status.reply_bytes <= MAX_REPLY_BYTES:
            raise ExchangeFailed(f"{self.name} announced a sum of {status.reply_bytes} bytes; update its server")
        awaited.status, awaited.reply = status, Staging(status.reply_bytes, self._pool)

    def _take(self, awaited: _Awaited, chunk: ReadChunk) -> None:
        status, reply, head = awaited.status, awaited.reply, chunk.head
        if status is None or reply is None:
            return
        problem = reply.problem(head.offset_bytes, head.total_bytes, len(chunk.data))
        if problem or crc32(chunk.data) != head.crc32:
            # Reconnecting requests it again.
            raise Unavailable(f"Received a damaged sum: {problem or 'wrong checksum'}.")
        self.received_bytes += len(chunk.data)
        if reply.put(head.offset_bytes, chunk.data, head.crc32):
            self._request.known_member_count = status.member_count
            number, call = awaited.payload.key
            self._received = max(self._received, (number, call + 1))
            awaited.result.set_result(
                Incoming(
                    sum=reply.take(),
                    accepted=status.status != pb.SegmentStatus.STATUS_LATE,
                    member_count=status.member_count,
                    contributor_count=len(status.ranks),
                )
            )

    def _refusal(self, awaited: _Awaited, status: pb.SegmentStatus) -> ExchangeFailed:
        if status.status == pb.SegmentStatus.STATUS_BEHIND:
            return ExchangeFailed(
                f"this rank is too far behind {self.name}: {status.text}."
                " Restart it from a newer checkpoint or from the weights of another rank"
            )
        return ExchangeFailed(
            f"{self.name} refused a payload of round {awaited.payload.round}: {status.text}."
            " All ranks must run the same version with the same settings"
        )

    async def _heartbeat(self) -> None:
        """Renews the lease while the rank computes."""
        while True:
            await asyncio.sleep(self._request.terms.lease_s / HEARTBEATS_PER_LEASE)
            try:
                await self.join()
            except (Unavailable, DeadlineExceeded):
                # Not while a stream continues, which detects it itself.
                if self._orders is None and not self._awaited:
                    self._is_joined = False
                    self.try_next()
            except FulmenError:
                continue  # the next call reports it


def failed(name: str, error: FulmenError) -> ExchangeFailed:
    """Converts a server's refusal to an `ExchangeFailed`."""
    listed = "".join(f"\n  {violation.field}: {violation.description}" for violation in error.violations)
    return ExchangeFailed(f"{name} refused this rank ({error.reason}): {error.message}{listed}")
