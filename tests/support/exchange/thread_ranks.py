"""Ranks that are threads of a test, each with a model, a link to the others and a reducer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.terms import MAX_RANKS
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec
from fulmen_exchange.links.link import QuorumSum, Sums
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import load_codecs

LIMIT_S = 30.0


class Meeting:
    """Where threads that stand for ranks put what they send each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.slots: list[Any] = [None] * size

    def all(self, rank: int, value: Any) -> list[Any]:
        """Gives every rank the values of all."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadLink:
    """Each rank is the shard of one segment, and payloads travel as bytes.

    Attributes:
        late: Says of a round whether this rank's payloads come too late.
        missing: Whether sums are made without this rank's tensors.
        sums: How many tensors were summed.
        begun: How many rounds have begun.
        waves: Buckets that were exchanged at a time.
    """

    missed_sums = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._place = self.rank = rank
        self.size = self.shards = len(meeting.slots)
        self._held: dict[SegmentCodec, Shard] = {}
        self._shard: Shard | None = None
        self.sent_bytes = self.received_bytes = self.up_bytes = self.down_bytes = 0
        self.late: Callable[[int], bool] = lambda _: False
        self.missing = False
        self.sums = 0
        self.begun = 0
        self.waves: list[tuple[int, ...]] = []

    def told(self, value: Any) -> list[Any]:
        """Returns what all ranks tell."""
        return list(self._meeting.all(self._place, value))

    def begin(self) -> None:
        """Nobody comes or goes."""
        self.begun += 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds in the order of the ranks."""
        self.sums += 1
        values = self._meeting.all(self._place, torch.zeros_like(tensor) if self.missing else tensor.clone())
        tensor.copy_(sum(values[1:], start=values[0]))
        self._count(up=tensor.numel() * tensor.element_size(), down=tensor.numel() * tensor.element_size())

    def sum_quorum(self, tensor: Tensor) -> Sequence[QuorumSum]:
        """Adds what ranks have that are not late in this round."""
        self.sums += 1
        on_time = not self.late(self.begun)
        given = None if not on_time else torch.zeros_like(tensor) if self.missing else tensor.clone()
        values = [one for one in self._meeting.all(self._place, given) if one is not None]
        tensor.copy_(sum(values[1:], start=values[0]))
        self._count(up=tensor.numel() * tensor.element_size(), down=tensor.numel() * tensor.element_size())
        factor = self.size / len(values)
        return (QuorumSum(begin=0, end=tensor.numel(), accepted=on_time, factor=factor),)

    def _count(self, *, up: int, down: int) -> None:
        self.sent_bytes += up
        self.up_bytes += up
        self.received_bytes += down
        self.down_bytes += down

    def supports(self, codec: SegmentCodec) -> bool:
        """Takes payloads of any codec."""
        return True

    def use(self, codec: SegmentCodec) -> Shard:
        """Keeps the shard of each codec."""
        self._shard = self._held.setdefault(codec, Shard(codec))
        return self._shard

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """Sums the segments."""
        assert self._shard is not None
        on_time = not self.late(round_.number)
        together = self._meeting.all(self._place, tuple(payloads))
        assert together == [together[0]] * self.size, f"ranks exchange other buckets at a time: {together}"
        self.waves.append(together[0])
        found = {}
        for bucket, segments in payloads.items():
            messages = [wire.encode(payload) for payload in segments]
            sent = self._meeting.all(self._place, messages if on_time else None)
            mine = [wire.decode(of_rank[self._place]) for of_rank in sent if of_rank is not None]
            reply = self._shard.reduce(
                bucket, mine, replace(round_, rank=MAX_RANKS + self.rank, bucket=bucket, ratio_factor=1.0)
            )
            replies = self._meeting.all(self._place, wire.encode(reply))
            self._count(up=sum(map(len, messages)), down=sum(map(len, replies)))
            present = sum(of_rank is not None for of_rank in sent)
            found[bucket] = Sums(
                replies=[wire.decode(reply) for reply in replies],
                accepted=[on_time] * self.size,
                factors=[self.size / present] * self.size,
            )
        return found


@dataclass
class Rank:
    """One rank."""

    number: int
    world: int
    link: ThreadLink
    parameters: Mapping[str, nn.Parameter]
    reducer: CodecReducer

    def gradients(self, round_: int) -> list[Tensor]:
        """Draws what this rank's passes give in a round."""
        return drawn(self.number, round_, self.parameters)

    def reduce(self, round_: int, *, scale: float = 1.0, **step_info: Any) -> Tensor:
        """Sums what was drawn for a round; returns all sums, flat."""
        for parameter, gradient in zip(self.parameters.values(), self.gradients(round_), strict=True):
            parameter.grad = gradient * scale
        return self.reduced(**step_info)

    def reduced(self, **step_info: Any) -> Tensor:
        """Sums the gradients that the parameters have; returns all sums, flat."""
        parameters = list(self.parameters.values())
        self.reducer.reduce(parameters, Ranks(), StepInfo(**step_info))
        self.reducer.on_step()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def plain_sum(self, round_: int) -> Tensor:
        """Adds up what was drawn for a round on all ranks."""
        of_ranks = [drawn(rank, round_, self.parameters) for rank in range(self.world)]
        return torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in of_ranks]).sum(0)


def drawn(rank: int, round_: int, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Draws gradients that a rank has in a round."""
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return [torch.randn(p.shape, generator=generator) for p in parameters.values()]


def model_of(seed: int) -> nn.Module:
    """Makes a model whose first two matrices are compressed, and all else is not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(130, 90), nn.Linear(90, 70), nn.Linear(70, 3))


def settings_of(codec: str, **given: Any) -> Any:
    """Makes settings, without a warm-up unless one is asked for."""
    policy = {"kind": "fixed", "warmup_rounds": 0, **given.pop("policy", {})}
    return load_codecs()[codec].settings.model_validate({"policy": policy, **given})


def on_ranks(
    work: Callable[[Rank], Any], codec: str, *, world: int = 3, optimizer: str = "sgd", **given: Any
) -> list[Any]:
    """Does something on every rank at once; all hold the same model."""
    meeting = Meeting(world)
    models = [model_of(7) for _ in range(world)]

    def alone(number: int) -> Any:
        link = ThreadLink(meeting, number)
        parameters = dict(models[number].named_parameters())
        reducer = CodecReducer.open(
            settings_of(codec, **given), parameters=parameters, link=link, seed=0, optimizer=optimizer
        )
        try:
            return work(Rank(number=number, world=world, link=link, parameters=parameters, reducer=reducer))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(alone, number) for number in range(world)]
    errors = [error for error in (call.exception() for call in calls) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [call.result() for call in calls]
