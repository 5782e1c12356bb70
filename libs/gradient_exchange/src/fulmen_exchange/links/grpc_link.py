"""A link over gRPC: ranks of several sites, with shards of the sum on servers (`fulmen_exchange.server`).

The training thread waits in blocking calls; streams and heartbeats run on an event loop in another thread, so that a
membership survives long computations. Calls are counted from the beginning of a round, the same on every rank.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.errors import DeadlineExceeded, FulmenError, Unavailable
from fulmen.rpc.channel import FulmenChannel
from fulmen_exchange import wire
from fulmen_exchange.aggregator.checksum import LONG, crc32
from fulmen_exchange.aggregator.rounds import MAX_OPEN
from fulmen_exchange.aggregator.shard_sum import sum_payload
from fulmen_exchange.aggregator.terms import QUORUM_SUM, SUM
from fulmen_exchange.codecs.codec import Codec, Payload, PayloadInvalid, Round, SegmentCodec
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.layout import Layout
from fulmen_exchange.links.grpc_chunks import split
from fulmen_exchange.links.grpc_server import dial
from fulmen_exchange.links.grpc_shard import Incoming, Outgoing, ShardClient, failed
from fulmen_exchange.links.link import QuorumSum, Sums
from fulmen_exchange.links.pieces import waves
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.ranks import CPU
from fulmen_exchange.settings import CodecSettings

MAX_IN_FLIGHT = MAX_OPEN
"""Pieces of a tensor, or buckets, in flight at a time, so that uploads, sums and downloads overlap."""
RETRY_S = 0.2
CLOSE_TIMEOUT_S = 25.0

Value = TypeVar("Value")


class _LinkLoop:
    """The event loop of all links of this process, in a thread of its own.

    It is never closed: gRPC passes events between the loops of a process and fails if one is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.AbstractEventLoop:
        """Returns the loop, starting it on first use; thread-safe."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="exchange-links", daemon=True).start()
            return self._loop


link_loop = _LinkLoop()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcParticipant:
    """A rank and the terms it agrees to.

    Attributes:
        training_run: `projects/{project}/trainingRuns/{id}`.
        rank: This rank, from 0.
        world_size: Number of ranks with which the first round begins.
        layout: Layout of the parameters, with as many shards as there are targets.
        codec: The codec.
        codec_settings: Settings of the codec; those of the link may differ between ranks.
        device: Device of the sums.
    """

    training_run: str
    rank: int
    world_size: int
    layout: Layout
    codec: Codec
    codec_settings: CodecSettings
    device: torch.device = CPU

    def request(self, settings: GrpcLinkSettings, shard: int) -> pb.JoinRequest:
        """Returns the request to join a shard."""
        offsets = [self.layout.offsets_of(bucket) for bucket in range(len(self.layout.buckets))]
        terms = pb.ExchangeTerms(
            world_size=self.world_size,
            shard=shard,
            shard_count=len(settings.targets),
            layout_digest=self.layout.digest,
            codec=self.codec.name,
            codec_version=self.codec.version,
            codec_settings_json=self.codec_settings.model_dump_json(exclude={"link"}),
            segment_sizes=[each[shard + 1] - each[shard] for each in offsets],
            quorum=settings.quorum,
            min_wait_s=settings.min_wait_s,
            max_wait_s=settings.max_wait_s,
            straggler_timeout_s=settings.straggler_timeout_s,
            lease_s=settings.lease_s,
        )
        return pb.JoinRequest(training_run=self.training_run, rank=self.rank, terms=terms)


class GrpcLink:
    """Ranks of several sites; see `Link`. Created by `open`; must be closed.

    A rank that joins a running exchange opens its link first and learns from `next_round` where it is expected. It then copies
    weights, optimiser state and step from another rank as they are before that round (or from a checkpoint made there), and
    begins. Its codec's state is new: the residual of a rank that left is lost.
    """

    def __init__(
        self,
        rank: GrpcParticipant,
        settings: GrpcLinkSettings,
        *,
        connect: Callable[[str], FulmenChannel] = dial,
    ) -> None:
        """Sends nothing yet.

        Args:
            rank: This rank.
            settings: Settings of the link.
            connect: Opens the channel to an address, with token and certificates if required.
        """
        if rank.layout.shards != len(settings.targets):
            raise ValueError(f"layout has {rank.layout.shards} shards, settings have {len(settings.targets)} targets")
        self.missed_sums = 0
        crc32(bytes(LONG))  # loads the kernels here instead of on the event loop
        self._rank = rank
        self._settings = settings
        self._connect = connect
        self._size = rank.world_size
        self._round = 0
        self._call = 0
        self._shards: list[ShardClient] = []
        self._channels: list[FulmenChannel] = []
        self._is_ended = False

    @classmethod
    def open(
        cls,
        rank: GrpcParticipant,
        settings: GrpcLinkSettings,
        *,
        connect: Callable[[str], FulmenChannel] = dial,
    ) -> GrpcLink:
        """Joins every shard. See `__init__`.

        Raises:
            ExchangeFailed: if a shard refuses the rank, or one cannot be reached within the deadline.
        """
        link = cls(rank, settings, connect=connect)
        try:
            link._wait(link._join())
        except BaseException:
            link.kill()
            raise
        return link

    @property
    def rank(self) -> int:
        """See `Link`."""
        return self._rank.rank

    @property
    def size(self) -> int:
        """See `Link`: the number of members of the newest sum, the same on every rank that has it."""
        return self._size

    @property
    def shards(self) -> int:
        """See `Link`."""
        return len(self._settings.targets)

    @property
    def sent_bytes(self) -> int:
        """See `Link`."""
        return sum(shard.sent_bytes for shard in self._shards)

    @property
    def received_bytes(self) -> int:
        """See `Link`."""
        return sum(shard.received_bytes for shard in self._shards)

    @property
    def up_bytes(self) -> int:
        """See `Link`."""
        return self.sent_bytes

    @property
    def down_bytes(self) -> int:
        """See `Link`."""
        return self.received_bytes

    @property
    def next_round(self) -> int:
        """The round that `begin` begins; a joining rank needs the weights before it."""
        return self._round + 1

    def begin(self) -> None:
        """See `Link`."""
        self._round += 1
        self._call = 0
        for shard in self._shards:
            shard.begin(self._round)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Link`. Waits for all members.

        Sums are computed in float32 and rounded once; those of integers wrap around. Types without a wire format (float64, say)
        are sent as float32.

        Raises:
            ExchangeFailed: if the sum is unavailable.
        """
        self.missed_sums += sum(not part.accepted for part in self._summed(tensor, SUM))

    def sum_quorum(self, tensor: Tensor) -> Sequence[QuorumSum]:
        """See `Link` and `all_reduce`."""
        return self._summed(tensor, QUORUM_SUM)

    def _summed(self, tensor: Tensor, codec: str) -> list[QuorumSum]:
        """Sums a tensor in pieces; the codec determines whether all members are waited for."""
        flat = tensor.detach().flatten().to(device="cpu", dtype=tensor.dtype if wire.is_known(tensor.dtype) else None)
        if not wire.is_known(flat.dtype):
            flat = flat.float()
        in_flight: deque[tuple[Sequence[Tensor], Sequence[int], Future[list[Incoming]]]] = deque()
        found: list[QuorumSum] = []
        try:
            for wave in waves(flat, self.shards, self._settings.piece_bytes):
                if len(in_flight) == MAX_IN_FLIGHT:
                    self._receive(*in_flight.popleft(), found)
                # Single pieces rotate among the shards.
                first = self._call % self.shards if len(wave) == 1 else 0
                shards = range(first, first + len(wave))
                outgoing = [self._outgoing(sum_payload(piece), codec=codec) for piece in wave]
                in_flight.append((wave, shards, self._start(dict(zip(shards, outgoing, strict=True)))))
            while in_flight:
                self._receive(*in_flight.popleft(), found)
        finally:
            for _, _, future in in_flight:
                future.cancel()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return found

    def _receive(
        self, wave: Sequence[Tensor], shards: Sequence[int], future: Future[list[Incoming]], found: list[QuorumSum]
    ) -> None:
        """Replaces pieces by their sums, and notes what is in these."""
        for piece, shard, incoming in zip(wave, shards, self._finish(future), strict=True):
            begin = found[-1].end if found else 0
            found.append(
                QuorumSum(begin=begin, end=begin + piece.numel(), accepted=incoming.accepted, factor=incoming.factor)
            )
            [part] = self._decoded(incoming).parts
            if part.dtype is not piece.dtype or part.numel() != piece.numel():
                raise ExchangeFailed("a shard returned a sum of another type or size; update its server")
            piece.copy_(part)
            link_loop().call_soon_threadsafe(self._shards[shard].recycle, incoming.sum)

    def supports(self, codec: SegmentCodec) -> bool:
        """See `Link`; the terms of a run name one codec."""
        return codec == self._rank.codec

    def use(self, codec: SegmentCodec) -> None:
        """See `Link`: shards are on servers, which use the codec of the terms."""

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """See `Link`. Several buckets are in flight at a time, so that uploads and downloads overlap.

        Raises:
            ExchangeFailed: if a sum is unavailable.
        """
        settings = pb.CallSettings(number=round_.number, ratio=round_.ratio, seed=round_.seed, flush=round_.flush)
        in_flight: deque[tuple[int, Future[list[Incoming]]]] = deque()
        found: dict[int, Sums] = {}
        try:
            for bucket, segments in payloads.items():
                if len(in_flight) == MAX_IN_FLIGHT:
                    found |= self._sums(*in_flight.popleft())
                outgoing = {
                    shard: self._outgoing(payload, bucket=bucket, settings=settings)
                    for shard, payload in enumerate(segments)
                }
                in_flight.append((bucket, self._start(outgoing)))
            while in_flight:
                found |= self._sums(*in_flight.popleft())
        finally:
            for _, future in in_flight:
                future.cancel()
        return found

    def _sums(self, bucket: int, future: Future[list[Incoming]]) -> dict[int, Sums]:
        """Waits for the sums of a bucket."""
        incoming = self._finish(future)
        replies = [self._decoded(each, device=self._rank.device) for each in incoming]
        accepted, factors = [each.accepted for each in incoming], [each.factor for each in incoming]
        return {bucket: Sums(replies=replies, accepted=accepted, factors=factors)}

    def close(self) -> None:
        """Leaves every shard."""

        async def leave() -> None:
            await asyncio.gather(*(shard.leave() for shard in self._shards))
            await asyncio.gather(*(channel.close() for channel in self._channels))

        if not self._is_ended:
            self._is_ended = True
            self._wait(leave(), limit_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """Closes everything without leaving, like a process that dies."""

        async def stop() -> None:
            for shard in self._shards:
                shard.stop()
            await asyncio.gather(*(channel.close() for channel in self._channels))

        if not self._is_ended:
            self._is_ended = True
            self._wait(stop(), limit_s=CLOSE_TIMEOUT_S)

    def _outgoing(
        self, payload: Payload, *, codec: str = "", bucket: int = 0, settings: pb.CallSettings | None = None
    ) -> Outgoing:
        return Outgoing(
            round=self._round,
            call=self._call,
            bucket=bucket,
            codec=(codec or payload.codec, payload.version),
            settings=settings or pb.CallSettings(ratio=1.0),
            payload=split(wire.front_of(payload), wire.parts_of(payload)),
        )

    def _start(self, outgoing: dict[int, Outgoing]) -> Future[list[Incoming]]:
        """Sends payloads to their shards concurrently; returns a future of the sums."""

        async def gather() -> list[Incoming]:
            if len(outgoing) == 1:
                [(shard, payload)] = outgoing.items()
                return [await self._shards[shard].sum(payload)]
            tasks = [
                asyncio.create_task(self._shards[shard].sum(payload), name=f"exchange-shard-{shard}")
                for shard, payload in outgoing.items()
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        if not self._round:
            raise AssertionError("begin() must be called before the first call of a round")
        self._call += 1
        return asyncio.run_coroutine_threadsafe(gather(), link_loop())

    def _finish(self, future: Future[list[Incoming]]) -> list[Incoming]:
        found = self._result(future, self._settings.deadline_s)
        self._size = min(each.member_count for each in found)
        return found

    def _decoded(self, incoming: Incoming, *, device: torch.device | str = "cpu") -> Payload:
        staged = incoming.sum
        try:
            return wire.decode(staged.data, device=device, checksum=staged.checksum, copies=False)
        except PayloadInvalid as error:
            raise ExchangeFailed(f"a shard returned a malformed sum: {error}; update its server") from None

    async def _join(self) -> None:
        """Joins all shards, and finds the first round in which all of them expect this rank."""
        channels: dict[str, FulmenChannel] = {}
        for address in set(self._settings.addresses.values()):
            channels[address] = self._connect(address)
            self._channels.append(channels[address])
        incarnation = uuid.uuid4().hex
        for number, target in enumerate(self._settings.targets):
            request = self._rank.request(self._settings, number)
            request.incarnation = incarnation
            addresses = dict.fromkeys((target, *self._settings.spares))
            self._shards.append(ShardClient({address: channels[address] for address in addresses}, request))
        joined = [await self._joined(shard) for shard in self._shards]
        while len({each.first_round for each in joined}) > 1:
            first = max(each.first_round for each in joined)
            for shard in self._shards:
                shard.begin(first)
            joined = [await self._joined(shard) for shard in self._shards]
        self._round = joined[0].first_round - 1
        for shard in self._shards:
            shard.begin(joined[0].first_round)
        if any(each.round for each in joined):
            self._size = min(each.member_count for each in joined)

    async def _joined(self, shard: ShardClient) -> pb.JoinResponse:
        while True:
            try:
                return await shard.join()
            except (Unavailable, DeadlineExceeded):
                shard.try_next()
                await asyncio.sleep(RETRY_S)
            except FulmenError as error:
                raise failed(shard.name, error) from error

    def _wait(self, coroutine: Coroutine[Any, Any, Value], *, limit_s: float | None = None) -> Value:
        """Runs a coroutine on the loop's thread; see `_result`."""
        limit_s = self._settings.deadline_s if limit_s is None else limit_s
        return self._result(asyncio.run_coroutine_threadsafe(coroutine, link_loop()), limit_s)

    def _result(self, future: Future[Value], limit_s: float) -> Value:
        """Waits for a future of the loop's thread.

        Raises:
            ExchangeFailed: if it takes longer than the deadline.
        """
        try:
            return future.result(limit_s)
        except FutureTimeout:
            future.cancel()
            names = ", ".join(sorted(set(self._settings.addresses.values())))
            raise ExchangeFailed(
                f"no answer from {names} within {limit_s:g} s in round {self._round}, call {self._call - 1}: check that"
                " all ranks are running and the servers are reachable"
            ) from None
