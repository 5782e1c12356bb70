"""Ranks of several sites, each shard of the sum at a server; see `transport.gradient_exchange`.

The training thread waits in blocking calls; streams and heartbeats live on an event loop in a thread of their own, so that
a membership outlasts any computation. Calls are counted from the beginning of a round, the same on every rank.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.errors import DeadlineExceeded, FulmenError, Unavailable
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_exchange import wire
from fulmen_exchange.aggregator.checksum import LONG, crc32
from fulmen_exchange.aggregator.rounds import MAX_OPEN
from fulmen_exchange.aggregator.shard_sum import sum_payload
from fulmen_exchange.codecs.codec import Codec, Payload, PayloadInvalid, Round, SegmentCodec
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.layout import Layout
from fulmen_exchange.links.grpc_chunks import cut
from fulmen_exchange.links.grpc_loop import link_loop
from fulmen_exchange.links.grpc_settings import GrpcLinkSettings
from fulmen_exchange.links.grpc_shard import Incoming, Outgoing, ShardClient, failed
from fulmen_exchange.links.link import Sums
from fulmen_exchange.ranks import CPU
from fulmen_exchange.settings import CodecSettings

SMALL = 65_536
"""Elements up to which a tensor is summed by one shard, so that all of it is the sum of the same ranks."""
MAX_IN_FLIGHT = MAX_OPEN
"""ParameterSlices of a tensor, or buckets, that are under way at a time: payloads go up while sums are made and others come down."""
RETRY_S = 0.2
CLOSE_TIMEOUT_S = 25.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcParticipant:
    """Who takes part, and with whom it agrees on what.

    Attributes:
        training_run: `trainingRuns/{id}`.
        rank: From 0.
        world_size: Ranks with which the first round begins.
        layout: Where each parameter lies; has as many shards as there are targets.
        codec: The codec.
        codec_settings: Its settings; what they say of the link is not compared.
        device: Where sums are wanted.
    """

    training_run: str
    rank: int
    world_size: int
    layout: Layout
    codec: Codec
    codec_settings: CodecSettings
    device: torch.device = CPU

    def request(self, settings: GrpcLinkSettings, shard: int) -> pb.JoinRequest:
        """Returns what a shard is joined with."""
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
    """See `exchange.link.Link`. Made by `open`; to be closed.

    Who joins in mid-run opens its link first, which tells by `next_round` where it will be waited for; then it takes over
    weights, state of the optimiser and step of another rank as they are before that round (of a checkpoint, if one is made
    just there), and begins. Its codec's state is new: what a rank that has gone had kept back is lost with it.
    """

    def __init__(
        self,
        rank: GrpcParticipant,
        settings: GrpcLinkSettings,
        *,
        connect: Callable[[str], FulmenChannel] = open_channel,
    ) -> None:
        """Sends nothing yet.

        Args:
            rank: Who takes part.
            settings: Where the shards are.
            connect: Opens the channel to an address, with a token of role `service` and certificates where they are
                asked for.
        """
        if rank.layout.shards != len(settings.targets):
            raise ValueError(f"a layout of {rank.layout.shards} shards, but {len(settings.targets)} targets")
        self.missed_sums = 0
        crc32(bytes(LONG))  # what that needs is made ready here, and not on the event loop
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
        connect: Callable[[str], FulmenChannel] = open_channel,
    ) -> GrpcLink:
        """Joins every shard. See `__init__`.

        Raises:
            ExchangeFailed: if one refuses the rank, or none can be reached within the deadline.
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
        """See `Link`: how many the newest sum was expected of, the same on every rank that has it."""
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
    def next_round(self) -> int:
        """The round that `begin` begins; who joins in mid-run needs the weights as they are before it."""
        return self._round + 1

    def begin(self) -> None:
        """See `Link`."""
        self._round += 1
        self._call = 0
        for shard in self._shards:
            shard.begin(self._round)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Link`. Waits for all members.

        Sums are made in float32 and rounded once, those of whole numbers go around as a process group's do. What payloads
        cannot have (float64, say) goes as float32.

        Raises:
            ExchangeFailed: if the sum cannot be had.
        """
        flat = tensor.detach().flatten().to(device="cpu", dtype=tensor.dtype if wire.is_known(tensor.dtype) else None)
        if not wire.is_known(flat.dtype):
            flat = flat.float()
        in_flight: deque[tuple[Sequence[Tensor], Sequence[int], Future[list[Incoming]]]] = deque()
        try:
            for wave in _waves(flat, self.shards, self._settings.piece_bytes):
                if len(in_flight) == MAX_IN_FLIGHT:
                    self._land(*in_flight.popleft())
                # One that is alone takes turns among the shards.
                first = self._call % self.shards if len(wave) == 1 else 0
                shards = range(first, first + len(wave))
                outgoing = [self._outgoing(sum_payload(piece)) for piece in wave]
                in_flight.append((wave, shards, self._start(dict(zip(shards, outgoing, strict=True)))))
            while in_flight:
                self._land(*in_flight.popleft())
        finally:
            for _, _, future in in_flight:
                future.cancel()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _land(self, wave: Sequence[Tensor], shards: Sequence[int], future: Future[list[Incoming]]) -> None:
        """Puts sums in the place of what they are of."""
        for piece, shard, incoming in zip(wave, shards, self._finish(future), strict=True):
            self.missed_sums += not incoming.accepted
            [part] = self._decoded(incoming).parts
            if part.dtype is not piece.dtype or part.numel() != piece.numel():
                raise ExchangeFailed("a shard returned a sum of another type or size; update its server")
            piece.copy_(part)
            link_loop().call_soon_threadsafe(self._shards[shard].recycle, incoming.sum)

    def supports(self, codec: SegmentCodec) -> bool:
        """See `Link`; the terms of a run name one codec."""
        return codec == self._rank.codec

    def use(self, codec: SegmentCodec) -> None:
        """See `Link`: shards are elsewhere, and sum what they were joined for."""

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """See `Link`. Some buckets are under way at a time, so that payloads go up while sums of others come down.

        Raises:
            ExchangeFailed: if a sum cannot be had.
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
        return {bucket: Sums(replies=replies, accepted=[each.accepted for each in incoming])}

    def close(self) -> None:
        """Leaves every shard."""

        async def leave() -> None:
            await asyncio.gather(*(shard.leave() for shard in self._shards))
            await asyncio.gather(*(channel.close() for channel in self._channels))

        if not self._is_ended:
            self._is_ended = True
            self._wait(leave(), limit_s=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """Ends everything without a word to anybody, as a process that dies does."""

        async def stop() -> None:
            for shard in self._shards:
                shard.stop()
            await asyncio.gather(*(channel.close() for channel in self._channels))

        if not self._is_ended:
            self._is_ended = True
            self._wait(stop(), limit_s=CLOSE_TIMEOUT_S)

    def _outgoing(self, payload: Payload, *, bucket: int = 0, settings: pb.CallSettings | None = None) -> Outgoing:
        return Outgoing(
            round=self._round,
            call=self._call,
            bucket=bucket,
            codec=(payload.codec, payload.version),
            settings=settings or pb.CallSettings(ratio=1.0),
            payload=cut(wire.front_of(payload), wire.parts_of(payload)),
        )

    def _start(self, outgoing: dict[int, Outgoing]) -> Future[list[Incoming]]:
        """Begins to have payloads summed by their shards, all at a time."""

        async def gather() -> list[Incoming]:
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
            raise AssertionError("begin() comes before the first call of a round")
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
            raise ExchangeFailed(f"a shard returned a sum that cannot be read: {error}; update its server") from None

    async def _join(self) -> None:
        """Joins all shards, and finds the round in which all of them expect this rank."""
        channels: dict[str, FulmenChannel] = {}
        for target in self._settings.targets:
            if target not in channels:
                channels[target] = self._connect(target)
                self._channels.append(channels[target])
        incarnation = uuid.uuid4().hex
        for number, target in enumerate(self._settings.targets):
            request = self._rank.request(self._settings, number)
            request.incarnation = incarnation
            self._shards.append(ShardClient(channels[target], request))
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
                await asyncio.sleep(RETRY_S)
            except FulmenError as error:
                raise failed(shard.name, error) from error

    def _wait(self, coroutine: Coroutine[Any, Any, Value], *, limit_s: float | None = None) -> Value:
        """Runs something on the loop's thread; see `_result`."""
        limit_s = self._settings.deadline_s if limit_s is None else limit_s
        return self._result(asyncio.run_coroutine_threadsafe(coroutine, link_loop()), limit_s)

    def _result(self, future: Future[Value], limit_s: float) -> Value:
        """Waits for what runs on the loop's thread.

        Raises:
            ExchangeFailed: if it takes longer than the deadline.
        """
        try:
            return future.result(limit_s)
        except FutureTimeout:
            future.cancel()
            names = ", ".join(sorted(set(self._settings.targets)))
            raise ExchangeFailed(
                f"no answer from {names} within {limit_s:g} s in round {self._round}, call {self._call - 1}: see whether"
                " all ranks live, and whether the servers can be reached"
            ) from None


def _waves(flat: Tensor, shards: int, piece_bytes: int) -> Iterator[tuple[Tensor, ...]]:
    """Cuts a flat tensor up: in each wave a piece for each shard, all of them for one if it is small."""
    size, most = flat.numel(), piece_bytes // flat.element_size()
    if not size:
        return
    pieces = flat.split(size if size <= SMALL else min(most, -(-size // shards)))
    for begin in range(0, len(pieces), shards):
        yield pieces[begin : begin + shards]
