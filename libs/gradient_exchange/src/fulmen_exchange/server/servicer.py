"""`fulmen.algorithm.v1.GradientExchangeService`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import (
    GradientExchangeServiceServicer,
    add_GradientExchangeServiceServicer_to_server,
)
from fulmen.errors import (
    ArgumentInvalid,
    DeadlineExceeded,
    Draining,
    QuotaExceeded,
    TrainingRunNotFound,
    TrainingRunStateInvalid,
    Unavailable,
    Violation,
)
from fulmen_exchange.aggregator.effects import RankBehind, RankReplaced
from fulmen_exchange.aggregator.held_folder import FolderHeld, HeldFolder
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import CHUNK_BYTES, MAX_RANKS, Problem, Terms
from fulmen_exchange.links import grpc_chunks
from fulmen_exchange.links.grpc_chunks import ReadChunk
from fulmen_exchange.server import messages
from fulmen_exchange.server.runs import ExchangeFolders, RunAccess
from fulmen_exchange.server.shards import HELD_BYTES_SETTING, Outbox, ServedShard

if TYPE_CHECKING:
    from fulmen_exchange.aggregator.shard_sum import Restored, ShardSum

SERVICE = "fulmen.algorithm.v1.GradientExchangeService"
EXCHANGE = "Exchange"
OPEN_TIMEOUT_S = 15.0
TICK_S = 0.1
LINGER_S = 5.0
QUIET_S = 0.5
SWEEP_S = 600.0
MAX_NAME = 128
MAX_VIOLATIONS = 20
"""Per response; they are sent as metadata, which is limited."""
PAGE_BYTES = 2 * 2**20
"""Of a response; gRPC's default limit is twice as much."""

_log = structlog.get_logger()
Message = ReadChunk | pb.ExchangeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLimits:
    """Limits on what ranks can make a server hold.

    Attributes:
        max_shards: Shards of all runs together.
        max_elements: Elements of one shard, all segments together.
        max_held_bytes: Memory of sums, residuals, payloads and replies, of all shards together.
        forget_s: How long a shard without members is kept in memory.
        keep_s: How long its files are kept, unless its run is over.
    """

    max_shards: int = 64
    max_elements: int = 2**31
    max_held_bytes: int = 8 * 2**30
    forget_s: float = 600.0
    keep_s: float = 7 * 86_400.0


class GradientExchangeServicer(GradientExchangeServiceServicer):
    """The service, and the background role that advances its time. Added to a server by `add_exchange`."""

    def __init__(
        self,
        *,
        runs: RunAccess,
        folder: Path | None = None,
        is_synced: bool = True,
        clock: Callable[[], float] = time.monotonic,
        limits: ExchangeLimits = ExchangeLimits(),
    ) -> None:
        """Serves nothing yet.

        Args:
            runs: The runs that callers may access.
            folder: Folder of the sums stored for a restart; None to store none.
            is_synced: Whether stored sums must survive a crash of the machine.
            clock: Returns the time in seconds.
            limits: Limits on what ranks can make the server hold.
        """
        self._runs = runs
        self._folders = (
            None
            if folder is None
            else ExchangeFolders(folder, keep_s=limits.keep_s, is_over=runs.is_over, is_synced=is_synced)
        )
        self._is_synced = is_synced
        self._clock = clock
        self._limits = limits
        self._shards: dict[str, dict[int, ServedShard]] = {}
        self._opening = asyncio.Lock()
        self._swept_s = -SWEEP_S
        self._drains = False

    async def run(self) -> None:
        """Removes silent members and makes sums without stragglers until cancelled."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            await self.end()

    async def tick(self) -> None:
        """Does everything that is due."""
        for run, shards in list(self._shards.items()):
            for number, shard in list(shards.items()):
                if shards.get(number) is not shard:
                    continue  # replaced while another shard was being stopped
                shard.tick()
                if self._clock() >= shard.empty_since_s + self._limits.forget_s:
                    del shards[number]
                    await shard.end()
            if not shards:
                self._shards.pop(run, None)
        if self._folders is not None and self._clock() >= self._swept_s + SWEEP_S:
            self._swept_s = self._clock()
            async with self._opening:
                await asyncio.to_thread(self._folders.sweep, set(self._shards))

    def held(self) -> list[tuple[str, ServedShard]]:
        """Returns all shards with their runs; thread-safe."""
        return [(run, shard) for run, shards in list(self._shards.items()) for shard in list(shards.values())]

    def drain(self) -> None:
        """Ends open streams and refuses new ones; ranks reconnect when the server returns."""
        self._drains = True
        for shard in self._all():
            shard.drain()

    async def end(self) -> None:
        """Stops and drops all shards."""
        shards = list(self._all())
        self._shards.clear()
        for shard in shards:
            await shard.end()

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        """Adds a rank to an exchange."""
        self._refuse_if_draining()
        self._runs.require(request.training_run)
        terms = messages.terms_of(request.terms)
        problems = terms.problems(max_elements=self._limits.max_elements)
        if not 0 <= request.rank < MAX_RANKS:
            problems.append(Problem(field="rank", description=f"must be 0 to {MAX_RANKS - 1}"))
        if not 0 < len(request.incarnation) <= MAX_NAME or len(request.history) > MAX_NAME:
            problems.append(Problem(field="incarnation", description=f"has 1 to {MAX_NAME} characters, as `history`"))
        _refuse("The rank cannot join the exchange", problems)
        shard = await self._shard_for(request.training_run, terms, request)
        _refuse("The rank cannot join: its terms differ from the run's", shard.machine.terms.differences(terms))
        try:
            joined = shard.join(request.rank, request.incarnation, messages.resume_point_of(request))
        except (RankBehind, RankReplaced) as error:
            text = _behind(str(error)) if isinstance(error, RankBehind) else f"The rank was replaced: {error}."
            raise TrainingRunStateInvalid(text, training_run=request.training_run) from None
        return messages.joined(joined)

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        """Ends a membership."""
        self._runs.require(request.training_run)
        shard = self._shards.get(request.training_run, {}).get(request.shard)
        if shard is not None:
            shard.leave(request.rank, request.incarnation)
        return pb.LeaveResponse()

    async def Exchange(
        self, requests: AsyncIterator[Message], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes | pb.ExchangeResponse]:
        """Carries chunks in both directions."""
        self._refuse_if_draining()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineExceeded(f"The stream was not opened within {OPEN_TIMEOUT_S:.0f} s.") from None
        if not isinstance(first, pb.ExchangeRequest) or not first.HasField("open"):
            _refuse("The stream is malformed", [Problem(field="open", description="must be the first message")])
            return
        opened = first.open
        self._runs.require(opened.training_run)
        shard = self._shards.get(opened.training_run, {}).get(opened.shard)
        if shard is None or shard.machine.members.get(opened.rank, opened.incarnation) is None:
            # It may have been a member of a former server, with the same epoch number.
            raise Unavailable("The rank is not a member of this exchange; join it first.")
        outbox = shard.open(opened.rank, opened.incarnation)
        reading = asyncio.create_task(_read(requests, shard, opened, outbox), name="exchange-stream")
        try:
            while (answer := await outbox.next()) is not None:
                for response in messages.answer(answer, epoch=shard.machine.members.epoch):
                    yield response
        finally:
            reading.cancel()
            shard.close(opened.rank, opened.incarnation, outbox)

    async def GetRound(self, request: pb.GetRoundRequest, context: grpc.aio.ServicerContext) -> pb.GetRoundResponse:
        """Returns the statistics of a round."""
        shard = self._known(request.training_run).get(request.shard)
        record = shard.machine.records.get(request.round) if shard is not None else None
        if record is None:
            problem = Problem(field="round", description="unknown to the server")
            _refuse("Round not found", [problem])
            return pb.GetRoundResponse()
        return messages.round_(record)

    async def GetExchange(
        self, request: pb.GetExchangeRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetExchangeResponse:
        """Returns the state of a run's shards."""
        shards, now_s = self._known(request.training_run), self._clock()
        if request.page_token and not request.page_token.isdecimal():
            _refuse("Page not found", [Problem(field="page_token", description="must be a returned token")])
        numbers = [number for number in sorted(shards) if number >= int(request.page_token or 0)]
        response = pb.GetExchangeResponse()
        for number in numbers:
            shard = shards[number]
            status = messages.status(shard.machine, lost_residuals=shard.lost_residuals, now_s=now_s)
            if response.shards and response.ByteSize() + status.ByteSize() > PAGE_BYTES:
                response.next_page_token = str(number)
                break
            response.shards.append(status)
        return response

    def _refuse_if_draining(self) -> None:
        if self._drains:
            raise Draining("The service is shutting down.")

    def _known(self, name: str) -> dict[int, ServedShard]:
        self._runs.require(name)
        shards = self._shards.get(name)
        if not shards:
            raise TrainingRunNotFound("No rank of the run has joined an exchange on this server.", training_run=name)
        return shards

    def _room(self) -> int:
        return self._limits.max_held_bytes - sum(shard.held_bytes for shard in self._all())

    def _all(self) -> Iterator[ServedShard]:
        for shards in self._shards.values():
            yield from shards.values()

    async def _shard_for(self, run: str, terms: Terms, request: pb.JoinRequest) -> ServedShard:
        # One at a time, so that ranks that join together get the same shard.
        async with self._opening:
            shard = self._shards.get(run, {}).get(terms.shard)
            if shard is not None and _is_replaceable(shard, terms, request):
                del self._shards[run][terms.shard]
                await shard.end()
                shard = None
            if shard is None:
                if sum(1 for _ in self._all()) >= self._limits.max_shards:
                    raise QuotaExceeded(f"The server already holds {self._limits.max_shards} shards.")
                shard = await self._opened(run, terms, request)
                self._shards.setdefault(run, {})[terms.shard] = shard
            return shard

    async def _opened(self, run: str, terms: Terms, request: pb.JoinRequest) -> ServedShard:
        # Loads torch, which takes seconds.
        module: Any = await asyncio.to_thread(import_module, "fulmen_exchange.aggregator.shard_sum")
        held = None
        if self._folders is not None:
            try:
                held = await asyncio.to_thread(self._folders.hold, run, terms.shard)
            except FolderHeld:
                raise Unavailable(f"Another server holds shard {terms.shard}.") from None
        try:
            return await self._restored(module, run, terms, request, held)
        except BaseException:
            if held is not None:
                held.release()
            raise

    async def _restored(
        self, module: Any, run: str, terms: Terms, request: pb.JoinRequest, held: HeldFolder | None
    ) -> ServedShard:
        folder = None if held is None else held.path
        make = partial(module.ShardSum, terms, folder=folder, is_synced=self._is_synced)
        try:
            sums: ShardSum = await asyncio.to_thread(make)
        except module.TermsRefused as error:
            _refuse("The rank cannot join the exchange", error.problems)
            raise
        if sums.agreed_bytes > self._room():
            raise QuotaExceeded(
                f"The server has no memory for a shard of {sums.agreed_bytes} bytes; raise its setting {HELD_BYTES_SETTING}."
            )
        resume_point = messages.resume_point_of(request)
        restore = partial(
            sums.restore, at_least=resume_point.round - 1, known=resume_point.known, history=resume_point.history
        )
        restored: Restored = await asyncio.to_thread(restore)
        machine = RoundMachine(terms, room=self._room)
        machine.restore(restored.sums, epoch=restored.epoch, history=restored.history)
        shard = ServedShard(machine, sums, clock=self._clock, folder=held)
        if restored.has_lost:
            shard.lost_residuals += 1
            _log.warning("exchange_residual_lost", training_run=run, shard=terms.shard, round=resume_point.round)
        return shard


def add_exchange(servicer: GradientExchangeServicer, server: grpc.aio.Server) -> None:
    """Adds the service to a server like generated code, with chunks serialised by `grpc_chunks`."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.Exchange,
        request_deserializer=partial(grpc_chunks.read, pb.ExchangeRequest),
        response_serializer=grpc_chunks.write,
    )
    # Of several generic handlers the first applies, and registered methods, of which the last counts, come before them.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {EXCHANGE: handler}),))
    add_GradientExchangeServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(SERVICE, {EXCHANGE: handler})


async def _read(requests: AsyncIterator[Message], shard: ServedShard, opened: pb.OpenExchange, outbox: Outbox) -> None:
    """Receives chunks until the stream ends; errors end the outbox."""
    try:
        async for request in requests:
            if not isinstance(request, ReadChunk) or len(request.data) > CHUNK_BYTES:
                problem = Problem(field="chunk", description=f"has at most {CHUNK_BYTES} bytes, and follows one `open`")
                _refuse("The stream is malformed", [problem])
            elif not request.has_intact_head:
                # Of which sum it is a part is not known, so the rank sends again all that it sent on this stream.
                raise Unavailable("A chunk was damaged in transit.")
            else:
                shard.take(opened.rank, opened.incarnation, messages.chunk_of(request))
    except Exception as error:  # noqa: BLE001  (reported on the stream)
        await _until_quiet(requests)
        outbox.end(error)
    else:
        outbox.end()


async def _until_quiet(requests: AsyncIterator[Message]) -> None:
    """Discards further messages of a rank: gRPC does not report an error to a client that is still writing."""
    with contextlib.suppress(Exception):  # the first error is the one to report
        async with asyncio.timeout(LINGER_S):
            while True:
                async with asyncio.timeout(QUIET_S):
                    if await anext(aiter(requests), None) is None:
                        return


def _is_replaceable(shard: ServedShard, terms: Terms, request: pb.JoinRequest) -> bool:
    """Returns whether a new shard may replace this one: all members have left and the terms differ, it is broken and a new process joins, or it is lost."""
    members = shard.machine.members
    if shard.is_lost:
        return True
    if shard.is_broken:
        return members.get(request.rank, request.incarnation) is None
    return not members.ranks and bool(shard.machine.terms.differences(terms))


def _refuse(what: str, problems: list[Problem]) -> None:
    if problems:
        text = "; ".join(f"{problem.field}: {problem.description}" for problem in problems)
        violations = [
            Violation(field=problem.field, description=problem.description[: MAX_NAME * 2])
            for problem in problems[:MAX_VIOLATIONS]
        ]
        raise ArgumentInvalid(f"{what}: {text[:1000]}.", violations=violations)


def _behind(text: str) -> str:
    return f"The rank is too far behind: {text}. It needs the weights of a newer checkpoint, or of another rank."
