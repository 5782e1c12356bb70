"""The shards of a run, as the services that hold them report them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, FulmenError, TrainingRunNotFound
from fulmen.rpc.services import Services
from fulmen_cli.output import as_dict

__all__ = ["ServiceShards", "LastRound", "ask_all", "last_round"]

ASK_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceShards:
    """The answer of one service.

    Attributes:
        target: Its address.
        shards: Those that it holds.
        rounds: How the last whole round went, by shard: its number, and what is remembered of it.
        nothing: Its message why it holds none, if it was expected to hold one.
        problem: What is wrong if it did not answer.
    """

    target: str
    shards: Sequence[pb.ShardStatus] = ()
    rounds: Mapping[int, tuple[int, pb.GetRoundResponse]] = field(default_factory=dict)
    nothing: str = ""
    problem: FulmenError | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON-ready values."""
        if self.problem is not None:
            return {"service": self.target, "error": str(self.problem)}
        if self.nothing:
            return {"service": self.target, "shards": [], "nothing": self.nothing}
        rounds = [
            {"shard": shard, "round": number, **as_dict(went)} for shard, (number, went) in sorted(self.rounds.items())
        ]
        return {"service": self.target, "shards": [as_dict(shard) for shard in self.shards], "rounds": rounds}


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRound:
    """A round over all shards that remember it; bytes of one rank."""

    number: int
    shard_count: int
    ranks: Sequence[int]
    late_ranks: Sequence[int]
    raw_bytes: int
    sent_bytes: int
    reply_bytes: int
    duration_s: float


async def ask_all(clients: Mapping[str, Services], training_run: str, *, are_named: bool) -> list[ServiceShards]:
    """Asks services, by address, for the shards of a run; `are_named` if the user named them."""
    answers = (_ask(target, client, training_run, is_named=are_named) for target, client in clients.items())
    return list(await asyncio.gather(*answers))


def last_round(services: Sequence[ServiceShards]) -> LastRound | None:
    """Returns the newest round that has ended in every shard; None if none is known."""
    rounds = [one for each in services for one in each.rounds.values()]
    number = min((number for number, _ in rounds), default=0)
    went = [response for its_number, response in rounds if its_number == number and response.ranks]
    if not went:
        return None
    return LastRound(
        number=number,
        shard_count=len(went),
        ranks=sorted(set.intersection(*(set(each.ranks) for each in went))),
        late_ranks=sorted({rank for each in went for rank in each.late_ranks}),
        raw_bytes=sum(each.raw_bytes for each in went),
        sent_bytes=sum(each.sent_bytes for each in went),
        reply_bytes=sum(each.reply_bytes for each in went),
        duration_s=max(each.duration_s for each in went),
    )


async def _ask(target: str, client: Services, training_run: str, *, is_named: bool) -> ServiceShards:
    try:
        shards = await _shards(client, training_run)
        found = await asyncio.gather(*(_round(client, training_run, shard) for shard in shards))
    except TrainingRunNotFound as error:
        return ServiceShards(target=target, nothing=error.message if is_named else "")
    except FulmenError as error:
        return ServiceShards(target=target, problem=error)
    rounds = {shard.terms.shard: one for shard, one in zip(shards, found, strict=True) if one is not None}
    return ServiceShards(target=target, shards=shards, rounds=rounds)


async def _shards(client: Services, training_run: str) -> list[pb.ShardStatus]:
    found: list[pb.ShardStatus] = []
    request = pb.GetExchangeRequest(training_run=training_run)
    while True:
        page = await client.exchanges.GetExchange(request, timeout=ASK_LIMIT_S)
        found += page.shards
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def _round(client: Services, training_run: str, shard: pb.ShardStatus) -> tuple[int, pb.GetRoundResponse] | None:
    # The newest may be in flight; the one before it has ended.
    for number in (shard.round - 1, shard.round):
        if number > 0:
            request = pb.GetRoundRequest(training_run=training_run, round=number, shard=shard.terms.shard)
            try:
                return number, await client.exchanges.GetRound(request, timeout=ASK_LIMIT_S)
            except ArgumentInvalid:
                pass  # The server was started since, and remembers no such round.
    return None
