"""Clients of the store that never give up, and the ledger of everything that was acknowledged to them.

Each call goes to a replica of the group chosen anew. A call of which the outcome is not known is repeated as it was.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import DeadlineExceeded, SessionEnded, Unavailable
from fulmen.ids import DEFAULT_PROJECT, rollout_name, uuid7
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import lease_pb2, lease_service_pb2, rollout_pb2, span_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import span_service_pb2 as spans_pb
from tests.support.store.running import Stubs, results_of

__all__ = ["FeedReader", "Ledger", "LoadRunner", "Producer", "StoreGroup", "Zombie", "stored_spans"]

GROUP_SIZE = 2
GROUPS_PER_REQUEST = 8
MAX_BACKLOG = 600
SLOTS = 24
CALL_LIMIT_S = 10.0
SPAN_BATCH = 200
RETRY_PAUSE_S = 0.05
# A lost lease, however many of them, never makes a rollout fail for good.
POLICY = rollout_pb2.RolloutPolicy(max_attempts=100, retry_backoff={"nanos": 10_000_000})
ENDED = frozenset({lease_pb2.COMPLETION_STATUS_APPLIED, lease_pb2.COMPLETION_STATUS_DUPLICATE})


@dataclass(slots=True)
class Ledger:
    """What the store has acknowledged.

    Attributes:
        created: names of rollouts by the id of their group.
        applied: how often each attempt was acknowledged as ended just now.
        ended: attempts whose end was acknowledged.
        spans: ids of spans by the attempt they were stored for.
        cancels: names of rollouts that somebody asked to cancel.
        breaks: how often a client had to begin again elsewhere.
        runners_die: whether sessions end with work in hand, so that a rollout may end as RUNNER_LOST.
    """

    created: dict[str, tuple[str, ...]] = field(default_factory=dict)
    applied: Counter[str] = field(default_factory=Counter)
    ended: set[str] = field(default_factory=set)
    spans: dict[str, set[bytes]] = field(default_factory=dict)
    cancels: set[str] = field(default_factory=set)
    breaks: int = 0
    runners_die: bool = False

    def note(self, acks: Iterable[lease_pb2.CompletionAck]) -> None:
        """Notes answers to reports."""
        for ack in acks:
            if ack.status in ENDED:
                self.ended.add(ack.attempt)
            if ack.status == lease_pb2.COMPLETION_STATUS_APPLIED:
                self.applied[ack.attempt] += 1

    def backlog(self) -> int:
        """Counts the rollouts that are created and not ended."""
        return GROUP_SIZE * len(self.created) - len(self.ended)


class StoreGroup:
    """The replicas as a client sees them."""

    def __init__(self, channels: Sequence[FulmenChannel], rng: random.Random) -> None:
        self._stubs = [Stubs(channel) for channel in channels]
        self._rng = rng

    def any(self) -> Stubs:
        """Returns the stubs of one replica."""
        return self._rng.choice(self._stubs)

    @staticmethod
    @asynccontextmanager
    async def open(targets: Sequence[str], token: str, rng: random.Random) -> AsyncIterator[StoreGroup]:
        """Opens a channel to each replica."""
        channels = [open_channel(target, token=token, timeout_s=CALL_LIMIT_S) for target in targets]
        try:
            yield StoreGroup(channels, rng)
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))


class Producer:
    """Creates groups of rollouts under names of its own, each request until it is acknowledged."""

    def __init__(self, group: StoreGroup, ledger: Ledger, stop: asyncio.Event) -> None:
        self._group, self._ledger, self._stop = group, ledger, stop

    async def run(self) -> None:
        """Creates until it is told to stop."""
        while not self._stop.is_set():
            if self._ledger.backlog() > MAX_BACKLOG:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            groups = {
                str(uuid7()): tuple(rollout_name(DEFAULT_PROJECT, uuid7()) for _ in range(GROUP_SIZE))
                for _ in range(GROUPS_PER_REQUEST)
            }
            request = pb.BatchCreateRolloutsRequest(
                rollouts=[
                    rollout_pb2.Rollout(name=name, group_id=group, group_size=GROUP_SIZE, input=b"x", policy=POLICY)
                    for group, names in groups.items()
                    for name in names
                ]
            )
            await self._until_created(request)
            self._ledger.created |= groups

    async def _until_created(self, request: pb.BatchCreateRolloutsRequest) -> None:
        while True:
            try:
                await self._group.any().rollouts.BatchCreateRollouts(request)
            except (Unavailable, DeadlineExceeded):
                self._ledger.breaks += 1
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                return


class LoadRunner:
    """Takes work over a stream, writes spans for each attempt, then reports it; moves whenever its stream breaks."""

    def __init__(self, group: StoreGroup, ledger: Ledger) -> None:
        self._group, self._ledger = group, ledger
        self._session = ""
        self._held: dict[str, tuple[lease_pb2.Assignment, span_pb2.SpanChunk, bytes]] = {}

    async def run(self) -> None:
        """Works until it is cancelled."""
        while True:
            try:
                await self._stay(self._group.any())
            except SessionEnded:
                # Its time was over, or this is its second stream: whatever it held is another's.
                self._session = ""
                self._held = {}
            except (Unavailable, DeadlineExceeded):
                self._ledger.breaks += 1
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _stay(self, stubs: Stubs) -> None:
        stream = stubs.leases.StreamLeases()
        try:
            await stream.write(
                lease_service_pb2.StreamLeasesRequest(
                    open=lease_service_pb2.OpenSession(
                        runner=self._session,
                        info=lease_pb2.RunnerInfo(host="chaos", slot_count=SLOTS),
                        running_attempts=list(self._held),
                    )
                )
            )
            async with asyncio.timeout(CALL_LIMIT_S):
                opened = (await stream.read()).opened
            self._session = opened.runner
            for attempt in opened.lost_attempts:
                self._held.pop(attempt, None)
            await self._finish(stubs, stream, list(self._held))
            await self._demand(stream, SLOTS - len(self._held))
            async for message in stream:
                await self._hear(stubs, stream, message)
        except TimeoutError:
            raise Unavailable("The stream was not opened in time.") from None
        finally:
            stream.cancel()

    async def _hear(self, stubs: Stubs, stream: Any, message: lease_service_pb2.StreamLeasesResponse) -> None:
        match message.WhichOneof("message"):
            case "assign":
                for one in message.assign.assignments:
                    self._held[one.attempt] = (one, *_chunk(one.attempt))
                await self._finish(stubs, stream, [one.attempt for one in message.assign.assignments])
            case "ack":
                for ack in message.ack.acks:
                    self._held.pop(ack.attempt, None)
                self._ledger.note(message.ack.acks)
                await self._demand(stream, len(message.ack.acks))
            case "lease_lost":
                for attempt in message.lease_lost.attempts:
                    self._held.pop(attempt, None)

    async def _finish(self, stubs: Stubs, stream: Any, attempts: Sequence[str]) -> None:
        if not attempts:
            return
        held = [self._held[attempt] for attempt in attempts]
        writer = stubs.spans.AppendSpans()
        try:
            await writer.write(spans_pb.AppendSpansRequest(chunks=[chunk for _, chunk, _ in held]))
            async with asyncio.timeout(CALL_LIMIT_S):
                answer = await writer.read()
        except TimeoutError:
            raise Unavailable("The spans were not acknowledged in time.") from None
        finally:
            writer.cancel()
        assert answer.accepted_count == len(held), answer
        for assignment, _, span_id in held:
            self._ledger.spans.setdefault(assignment.attempt, set()).add(span_id)
        results = results_of([assignment for assignment, _, _ in held], rewards=[{"value": 1.0}])
        await stream.write(
            lease_service_pb2.StreamLeasesRequest(complete=lease_service_pb2.CompletedAttempts(results=results))
        )

    @staticmethod
    async def _demand(stream: Any, count: int) -> None:
        if count > 0:
            await stream.write(
                lease_service_pb2.StreamLeasesRequest(add_credits=lease_service_pb2.AddCredits(credit_count=count))
            )


class Zombie(LoadRunner):
    """A runner that again and again lets go of its session with work in hand, and later reports that work anywhere."""

    def __init__(self, group: StoreGroup, ledger: Ledger, rng: random.Random) -> None:
        super().__init__(group, ledger)
        ledger.runners_die = True
        self._rng = rng
        self._buried: list[lease_pb2.Assignment] = []

    async def _finish(self, stubs: Stubs, stream: Any, attempts: Sequence[str]) -> None:
        if self._rng.random() < 0.5:
            await super()._finish(stubs, stream, attempts)
            return
        self._buried += [assignment for assignment, _, _ in self._held.values()]
        if self._rng.random() < 0.5:
            # The store hears only that the stream broke; its session lives on until its time is over.
            self._session = ""
            self._held = {}
        await self._rise()
        raise Unavailable("The runner left.")

    async def _rise(self) -> None:
        chosen = self._rng.sample(self._buried, min(len(self._buried), 2 * SLOTS))
        if chosen:
            request = lease_service_pb2.CompleteAttemptsRequest(results=results_of(chosen, rewards=[{"value": 1.0}]))
            answer = await self._group.any().leases.CompleteAttempts(request)
            self._ledger.note(answer.acks)


class FeedReader:
    """Reads the completion feed and goes on from its cursor at another replica after each break."""

    def __init__(self, group: StoreGroup, ledger: Ledger) -> None:
        self._group, self._ledger = group, ledger
        self.read: list[pb.FinishedGroup] = []
        self._cursor = ""

    async def run(self) -> None:
        """Reads until it is cancelled."""
        while True:
            stream = self._group.any().rollouts.WatchRollouts(pb.WatchRolloutsRequest(cursor=self._cursor))
            try:
                async for message in stream:
                    self.read += message.groups
                    self._cursor = message.cursor or self._cursor
            except (Unavailable, DeadlineExceeded):
                self._ledger.breaks += 1
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                stream.cancel()


async def stored_spans(group: StoreGroup, attempts: Sequence[str]) -> dict[str, list[bytes]]:
    """Reads the ids of the spans that are stored for attempts, as often as they are stored."""
    found: dict[str, list[bytes]] = {}
    for start in range(0, len(attempts), SPAN_BATCH):
        request = spans_pb.StreamSpansRequest(parents=attempts[start : start + SPAN_BATCH])
        async for message in group.any().spans.StreamSpans(request):
            for chunk in message.chunks:
                payload = chunk.payload
                if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
                    payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
                found.setdefault(chunk.attempt, []).extend(
                    trace_pb2.Span.FromString(record.otlp_span).span_id
                    for record in span_pb2.SpanBatch.FromString(payload).spans
                )
    return found


def _chunk(attempt: str) -> tuple[span_pb2.SpanChunk, bytes]:
    span_id = uuid7().bytes[-8:]
    span = trace_pb2.Span(name="work", span_id=span_id, trace_id=uuid7().bytes, start_time_unix_nano=1)
    record = span_pb2.SpanRecord(otlp_span=span.SerializeToString(), scope="chaos")
    payload = span_pb2.SpanBatch(spans=[record]).SerializeToString()
    chunk = span_pb2.SpanChunk(
        attempt=attempt, chunk_id=str(uuid7()), span_count=1, codec=span_pb2.SPAN_CODEC_IDENTITY, payload=payload
    )
    return chunk, span_id
