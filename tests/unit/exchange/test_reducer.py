"""A codec between ranks sums gradients as a plain sum does, with the same bits on every rank, and loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulmen_algorithm.exchange import wire
from fulmen_algorithm.exchange.codec import Payload, Round, SegmentCodec
from fulmen_algorithm.exchange.layout import Layout
from fulmen_algorithm.exchange.reducer import CodecReducer, RanksDiverged
from fulmen_algorithm.exchange.registry import load_codecs, make_codec
from fulmen_algorithm.exchange.shard import Shard
from fulmen_algorithm.training.parallel import Ranks

WORLD = 3
LIMIT_S = 30.0
RATIO = 10.0


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
    """Ranks that are threads; each is the shard of one segment, and payloads travel as bytes."""

    def __init__(self, meeting: Meeting, rank: int, codec: Any) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = self.shards = len(meeting.slots)
        self._shard = Shard(codec) if isinstance(codec, SegmentCodec) else None
        self.sent_bytes = self.received_bytes = 0

    def begin(self) -> None:
        """Nobody comes or goes."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds in the order of the ranks."""
        values = self._meeting.all(self.rank, tensor.clone())
        tensor.copy_(sum(values[1:], start=values[0]))

    def exchange(self, bucket: int, payloads: Sequence[Payload], round_: Round) -> tuple[list[Payload], list[bool]]:
        """Sums the segments."""
        assert self._shard is not None
        sent = self._meeting.all(self.rank, [wire.encode(payload) for payload in payloads])
        mine = [wire.decode(of_rank[self.rank]) for of_rank in sent]
        replies = self._meeting.all(self.rank, wire.encode(self._shard.reduce(bucket, mine, round_)))
        return [wire.decode(reply) for reply in replies], [True] * self.size


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(130, 90), nn.Linear(90, 70), nn.Linear(70, 3))


def on_ranks(work: Callable[[int, CodecReducer], Any], codec: str, **settings: Any) -> list[Any]:
    """Does something on every rank at once; all hold the same model."""
    meeting = Meeting(WORLD)
    models = [model_of(7) for _ in range(WORLD)]

    def alone(rank: int) -> Any:
        chosen = load_codecs()[codec].settings(**settings)
        made = make_codec(chosen)
        link = ThreadLink(meeting, rank, made)
        named = list(models[rank].named_parameters())
        layout = Layout.of(named, chosen, shards=link.shards)
        reducer = CodecReducer(
            settings=chosen, codec=made, link=link, layout=layout, seed=0,
            ratio_at=lambda _: RATIO, parameters=dict(named),
        )  # fmt: skip
        try:
            return work(rank, reducer)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(alone, range(WORLD)))


def gradients_of(rank: int, round_number: int, reducer: CodecReducer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * round_number + rank)
    return [torch.randn(p.shape, generator=generator) for p in reducer.parameters.values()]


def reduced(rank: int, round_number: int, reducer: CodecReducer) -> Tensor:
    parameters = list(reducer.parameters.values())
    for parameter, gradient in zip(parameters, gradients_of(rank, round_number, reducer), strict=True):
        parameter.grad = gradient
    reducer.reduce(parameters, Ranks())
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def plain_sum(round_number: int, reducer: CodecReducer) -> Tensor:
    of_ranks = [gradients_of(rank, round_number, reducer) for rank in range(WORLD)]
    return torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in of_ranks]).sum(0)


@pytest.mark.parametrize("codec", sorted(load_codecs()))
def test_every_rank_has_the_same_bits_and_over_time_the_whole_sum(codec: str) -> None:
    rounds = 40
    # The momentum of dgc would be in the sum, and clipping takes something from it.
    settings = {"momentum": 0.0, "clip": 1e9} if codec == "dgc" else {}

    def work(rank: int, reducer: CodecReducer) -> tuple[list[Tensor], Tensor]:
        sums = [reduced(rank, number, reducer) for number in range(1, rounds + 1)]
        return sums, sum((plain_sum(n, reducer) for n in range(1, rounds + 1)), start=torch.zeros_like(sums[0]))

    of_ranks = on_ranks(work, codec, **settings)
    sums, wanted = of_ranks[0]
    for others, _ in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(sums, others, strict=True))
    got = torch.stack(sums).sum(0)
    # What is kept back is a few rounds' worth, out of forty.
    assert float((got - wanted).norm() / wanted.norm()) < 0.6
    assert float(torch.nn.functional.cosine_similarity(got, wanted, dim=0)) > 0.8


def test_uncompressed_it_is_the_plain_sum() -> None:
    def work(rank: int, reducer: CodecReducer) -> bool:
        return torch.allclose(reduced(rank, 1, reducer), plain_sum(1, reducer), atol=1e-5)

    assert on_ranks(work, "none") == [True] * WORLD


def test_a_number_that_is_not_finite_on_one_rank_goes_into_no_state() -> None:
    def work(rank: int, reducer: CodecReducer) -> tuple[bool, int, Tensor]:
        reduced(rank, 1, reducer)
        before = {key: value.clone() for key, value in reducer.states[0].items()}
        parameters = list(reducer.parameters.values())
        for parameter, gradient in zip(parameters, gradients_of(rank, 2, reducer), strict=True):
            parameter.grad = gradient
        if rank == 1:
            parameters[0].grad.view(-1)[5] = float("inf")  # type: ignore[union-attr]  # set above
        reducer.reduce(parameters, Ranks())
        same = all(torch.equal(value, reducer.states[0][key]) for key, value in before.items())
        return same, reducer.round_number, torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    for same, rounds, sums in on_ranks(work, "topk"):
        assert same
        assert rounds == 1
        assert not sums.isfinite().any(), "every rank skips the step"


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_a_parameter_without_gradient_on_any_rank_has_one_only_if_something_of_it_was_kept_back(codec: str) -> None:
    def work(rank: int, reducer: CodecReducer) -> list[list[int]]:
        parameters, found = list(reducer.parameters.values()), []
        for number, without in enumerate(([0, 1], [0, 1, 2], [], [0, 1]), start=1):
            for index, gradient in enumerate(gradients_of(rank, number, reducer)):
                # Of the third, the last rank alone has none in the first round.
                alone = index == 2 and number == 1 and rank == WORLD - 1
                parameters[index].grad = None if index in without or alone else gradient
            reducer.reduce(parameters, Ranks())
            found.append([index for index, parameter in enumerate(parameters) if parameter.grad is None])
        return found

    kept_back = codec == "topk"
    expected = [[0, 1], [0, 1] if kept_back else [0, 1, 2], [], [1] if kept_back else [0, 1]]
    assert on_ranks(work, codec) == [expected] * WORLD


def test_weights_of_any_shape_are_compared() -> None:
    def work(rank: int, reducer: CodecReducer) -> int:
        scalar, nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0))
        reducer.parameters = {**reducer.parameters, "scale": scalar, "nothing": nothing}
        reduced(rank, 1, reducer)
        return reducer.round_number

    assert on_ranks(work, "none", check_every=1) == [1] * WORLD


def test_each_ranks_gradient_is_clipped_before_dgc_accumulates_it() -> None:
    clip = 0.5

    def work(rank: int, reducer: CodecReducer) -> float:
        reducer.ratio_at = lambda _: 1.0
        parameters = list(reducer.parameters.values())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        if rank == 0:
            parameters[0].grad = torch.full_like(parameters[0], 3.0)
        reducer.reduce(parameters, Ranks())
        return float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])))

    assert on_ranks(work, "dgc", clip=clip) == pytest.approx([clip / WORLD**0.5] * WORLD, rel=1e-2)


def test_ranks_whose_weights_have_parted_are_told() -> None:
    def work(rank: int, reducer: CodecReducer) -> bool:
        if rank == 2:
            next(iter(reducer.parameters.values())).data[0, 0] += 1e-6
        reduced(rank, 1, reducer)
        with pytest.raises(RanksDiverged, match="round 2"):
            reduced(rank, 2, reducer)
        return True

    assert on_ranks(work, "qsgd", check_every=2) == [True] * WORLD


def test_a_round_in_which_everything_is_sent_leaves_nothing_behind() -> None:
    def work(rank: int, reducer: CodecReducer) -> tuple[Tensor, Tensor]:
        sums = [reduced(rank, number, reducer) for number in (1, 2, 3)]
        return torch.stack(sums).sum(0), sum((plain_sum(n, reducer) for n in (1, 2, 3)), start=torch.zeros(1))

    for got, wanted in on_ranks(work, "topk", full_sync_every=3):
        # bfloat16 rounds what is sent; that alone is kept back.
        assert float((got - wanted).norm() / wanted.norm()) < 1e-2
