"""`fulmen.algorithm.v1.GradientExchangeService`."""

from __future__ import annotations

import asyncio
import hashlib
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
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceServicer
from fulmen.errors import (
    ArgumentInvalid,
    DeadlineExceeded,
    QuotaExceeded,
    TrainingRunNotFound,
    TrainingRunStateInvalid,
    Unavailable,
    Violation,
)
from fulmen_algorithm.exchange.aggregator.effects import Behind, Replaced
from fulmen_algorithm.exchange.aggregator.rounds import RoundMachine
from fulmen_algorithm.exchange.aggregator.terms import CHUNK_BYTES, MAX_RANKS, Problem, Terms
from fulmen_algorithm.transport import exchange_messages as messages
from fulmen_algorithm.transport.exchange_shards import Outbox, ServedShard
from fulmen_service_kit.auth import current_caller

if TYPE_CHECKING:
    from fulmen_algorithm.exchange.aggregator.shard_sum import ShardSum

OPEN_LIMIT_S = 15.0
TICK_S = 0.1
MAX_NAME = 128

_log = structlog.get_logger()
Run = tuple[str, str]
"""Project and name; what different projects exchange never meets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLimits:
    """What ranks can make a server hold.

    Attributes:
        max_shards: Shards of all runs together.
        max_elements: Elements of one shard: all its segments.
        forget_s: How long a shard without members is kept.
    """

    max_shards: int = 64
    max_elements: int = 2**31
    forget_s: float = 600.0


class GradientExchangeServicer(GradientExchangeServiceServicer):
    """Decodes, calls once, encodes; and is the background role that makes time pass."""

    def __init__(
        self,
        *,
        project_of: Callable[[str], str],
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: ExchangeLimits = ExchangeLimits(),
    ) -> None:
        """Takes what the server knows of runs.

        Args:
            project_of: The project of a training run; raises TrainingRunNotFound.
            folder: Where sums are kept over a restart; None: nowhere.
            clock: The time, in seconds.
            limits: What is held at most.
        """
        self._project_of = project_of
        self._folder = folder
        self._clock = clock
        self._limits = limits
        self._shards: dict[Run, dict[int, ServedShard]] = {}
        self._opening = asyncio.Lock()

    async def run(self) -> None:
        """Removes silent members, and makes sums without stragglers, until it is cancelled."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            await self.end()

    async def tick(self) -> None:
        """Does what is due now."""
        for run, shards in list(self._shards.items()):
            for number, shard in list(shards.items()):
                if shards.get(number) is not shard:
                    continue  # another was opened in its place while the one before it was ended
                shard.tick()
                if self._clock() >= shard.empty_since_s + self._limits.forget_s:
                    del shards[number]
                    await shard.end()
            if not shards:
                self._shards.pop(run, None)

    def drain(self) -> None:
        """Ends the open streams; their ranks come back."""
        for shard in self._all():
            shard.drain()

    async def end(self) -> None:
        """Ends all that goes on, and forgets all shards."""
        shards = list(self._all())
        self._shards.clear()
        for shard in shards:
            await shard.end()

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        """Takes a rank in."""
        run = self._run(request.training_run)
        terms = messages.terms_of(request.terms)
        problems = terms.problems(max_elements=self._limits.max_elements)
        if not 0 <= request.rank < MAX_RANKS:
            problems.append(Problem(field="rank", description=f"must be 0 to {MAX_RANKS - 1}"))
        if not 0 < len(request.incarnation) <= MAX_NAME:
            problems.append(Problem(field="incarnation", description=f"has 1 to {MAX_NAME} characters"))
        _refuse("The rank cannot take part in an exchange", problems)
        shard = await self._shard_for(run, terms, request)
        _refuse(
            "The rank cannot take part: its terms differ from those of the run", shard.machine.terms.differences(terms)
        )
        try:
            joined = shard.join(
                request.rank,
                request.incarnation,
                round_=max(0, request.round),
                epoch=max(0, request.membership_epoch),
                known=max(0, request.known_member_count),
            )
        except (Behind, Replaced) as error:
            text = _behind(str(error)) if isinstance(error, Behind) else f"The rank's place was taken: {error}."
            raise TrainingRunStateInvalid(text, training_run=request.training_run[:MAX_NAME]) from None
        return pb.JoinResponse(
            membership_epoch=joined.epoch,
            member_count=len(joined.ranks),
            ranks=joined.ranks,
            round=joined.round,
            first_round=joined.first_round,
        )

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        """Ends a membership."""
        shard = self._shards.get(self._run(request.training_run), {}).get(request.shard)
        if shard is not None:
            shard.leave(request.rank, request.incarnation)
        return pb.LeaveResponse()

    async def Exchange(
        self, requests: AsyncIterator[pb.ExchangeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ExchangeResponse]:
        """Carries chunks both ways."""
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineExceeded(f"The stream was not opened within {OPEN_LIMIT_S:.0f} s.") from None
        if first is None or not first.HasField("open"):
            _refuse("The stream is malformed", [Problem(field="open", description="must be the first message")])
            return
        opened = first.open
        shard = self._shards.get(self._run(opened.training_run), {}).get(opened.shard)
        if shard is None:
            raise Unavailable("This server does not know the exchange: join it first.")
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
        """Returns how a round went."""
        shard = self._known(request.training_run).get(request.shard)
        record = shard.machine.records.get(request.round) if shard is not None else None
        if record is None:
            problem = Problem(field="round", description="not one of those that the server remembers")
            _refuse("There is no such round", [problem])
            return pb.GetRoundResponse()
        return messages.round_(record)

    async def GetExchange(
        self, request: pb.GetExchangeRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetExchangeResponse:
        """Returns how the shards of a run stand."""
        shards = self._known(request.training_run)
        now_s = self._clock()
        return pb.GetExchangeResponse(
            shards=[
                messages.status(shard.machine, lost_residuals=shard.lost_residuals, now_s=now_s)
                for _, shard in sorted(shards.items())
            ]
        )

    def _run(self, name: str) -> Run:
        """Returns a run that the caller may see; any other is as if it did not exist."""
        project = self._project_of(name)
        if not current_caller().may_access(project):
            raise TrainingRunNotFound("There is no such training run.", training_run=name[:MAX_NAME])
        return project, name

    def _known(self, name: str) -> dict[int, ServedShard]:
        shards = self._shards.get(self._run(name))
        if not shards:
            raise TrainingRunNotFound("No rank of the run has joined an exchange here.", training_run=name[:MAX_NAME])
        return shards

    def _all(self) -> Iterator[ServedShard]:
        for shards in self._shards.values():
            yield from shards.values()

    async def _shard_for(self, run: Run, terms: Terms, request: pb.JoinRequest) -> ServedShard:
        # One at a time, so that two ranks that join together find the same one.
        async with self._opening:
            shard = self._shards.get(run, {}).get(terms.shard)
            if shard is not None and _is_over(shard, terms, request):
                del self._shards[run][terms.shard]
                await shard.end()
                shard = None
            if shard is None:
                if sum(1 for _ in self._all()) >= self._limits.max_shards:
                    raise QuotaExceeded(f"The server holds {self._limits.max_shards} shards already.")
                shard = await self._opened(run, terms, request)
                self._shards.setdefault(run, {})[terms.shard] = shard
            return shard

    async def _opened(self, run: Run, terms: Terms, request: pb.JoinRequest) -> ServedShard:
        # It loads torch, which takes seconds.
        module: Any = await asyncio.to_thread(import_module, "fulmen_algorithm.exchange.aggregator.shard_sum")
        try:
            sums: ShardSum = await asyncio.to_thread(
                partial(module.ShardSum, terms, folder=self._folder_of(run, terms))
            )
        except module.TermsRefused as error:
            _refuse("The rank cannot take part in an exchange", error.problems)
            raise
        kept, epoch = await asyncio.to_thread(partial(sums.restore, at_least=request.round - 1))
        machine = RoundMachine(terms)
        machine.restore(kept, epoch=epoch)
        shard = ServedShard(machine, sums, clock=self._clock)
        if request.known_member_count and not kept and sums.keeps_state:
            shard.lost_residuals += 1
            _log.warning("exchange_residual_lost", training_run=run[1], shard=terms.shard, round=request.round)
        return shard

    def _folder_of(self, run: Run, terms: Terms) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / hashlib.sha256("\0".join(run).encode()).hexdigest()[:32] / f"shard-{terms.shard}"


async def _read(
    requests: AsyncIterator[pb.ExchangeRequest], shard: ServedShard, opened: pb.OpenExchange, outbox: Outbox
) -> None:
    """Takes chunks until the stream ends; what is wrong with it goes out on it."""
    try:
        async for request in requests:
            if len(request.chunk.data) > CHUNK_BYTES or request.HasField("open"):
                problem = Problem(field="chunk", description=f"has at most {CHUNK_BYTES} bytes, and follows one `open`")
                _refuse("The stream is malformed", [problem])
            shard.take(opened.rank, opened.incarnation, messages.chunk_of(request.chunk))
    except Exception as error:  # noqa: BLE001  (handed on to the stream)
        outbox.end(error)
    else:
        outbox.end()


def _is_over(shard: ServedShard, terms: Terms, request: pb.JoinRequest) -> bool:
    """Tells whether a shard gives place to a new one: for other settings when all have left, or when ranks start again."""
    members = shard.machine.members
    if shard.is_broken:
        return members.get(request.rank, request.incarnation) is None
    return not members.ranks and bool(shard.machine.terms.differences(terms))


def _refuse(what: str, problems: list[Problem]) -> None:
    if problems:
        told = "; ".join(f"{problem.field}: {problem.description}" for problem in problems)
        violations = [Violation(field=problem.field, description=problem.description) for problem in problems]
        raise ArgumentInvalid(f"{what}: {told[:1000]}.", violations=violations)


def _behind(text: str) -> str:
    return f"The rank is too far behind: {text}. It needs the weights of a newer checkpoint, or of another rank."
