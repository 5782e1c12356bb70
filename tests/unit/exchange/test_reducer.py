"""A codec between ranks sums gradients as a plain sum does, with the same bits on every rank, and loses nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fulmen_exchange.errors import RanksDiverged
from fulmen_exchange.registry import load_codecs
from tests.support.exchange.thread_ranks import Rank, on_ranks

WORLD = 3


@pytest.mark.parametrize("codec", sorted(load_codecs()))
def test_every_rank_has_the_same_bits_and_over_time_the_whole_sum(codec: str) -> None:
    rounds = 40
    # The momentum of dgc would be in the sum, and clipping takes something from it.
    settings = {"momentum": 0.0, "clip": 1e9} if codec == "dgc" else {}
    if "ratio" in load_codecs()[codec].settings.model_fields:
        settings["ratio"] = 10.0

    def work(rank: Rank) -> tuple[list[Tensor], Tensor]:
        sums = [rank.reduce(number) for number in range(1, rounds + 1)]
        return sums, sum((rank.plain_sum(n) for n in range(1, rounds + 1)), start=torch.zeros_like(sums[0]))

    of_ranks = on_ranks(work, codec, **settings)
    sums, wanted = of_ranks[0]
    for others, _ in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(sums, others, strict=True))
    got = torch.stack(sums).sum(0)
    # What is kept back is a few rounds' worth, out of forty.
    assert float((got - wanted).norm() / wanted.norm()) < 0.6
    assert float(torch.nn.functional.cosine_similarity(got, wanted, dim=0)) > 0.8


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("codec", ["topk", "qsgd", "powersgd", "none", "dgc"])
def test_a_number_that_cannot_be_summed_on_one_rank_goes_into_no_state(codec: str, number: float) -> None:
    def work(rank: Rank) -> tuple[bool, int, Tensor]:
        rank.reduce(1)
        before = rank.reducer.state()["codecs"]
        for parameter, gradient in zip(rank.parameters.values(), rank.gradients(2), strict=True):
            parameter.grad = gradient
        if rank.number == 1:
            rank.parameters["0.weight"].grad.view(-1)[5] = number  # type: ignore[union-attr]  # set above
        sums = rank.reduced()
        return same(before, rank.reducer.state()["codecs"]), rank.reducer.rounds, sums

    for unchanged, rounds, sums in on_ranks(work, codec):
        assert unchanged
        assert rounds == 1
        assert not sums.isfinite().any(), "every rank skips the step"


@pytest.mark.parametrize("codec", sorted(load_codecs()))
def test_large_gradients_never_make_sums_that_are_not_finite(codec: str) -> None:
    def work(rank: Rank) -> list[bool]:
        # Norms of about 1e17, which are summed, and then 1e20, at which every rank skips.
        sums = [rank.reduce(number, scale=1e15) for number in (1, 2, 3)]
        last = rank.reduce(4, scale=1e18)
        return [bool(one.isfinite().all()) for one in sums] + [bool(last.isfinite().any())]

    assert on_ranks(work, codec, full_sync_every=3) == [[True, True, True, False]] * WORLD


def same(one: object, other: object) -> bool:
    """Compares nested states, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one.view(torch.int32), other.view(torch.int32))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_a_parameter_without_gradient_on_any_rank_has_one_only_if_something_of_it_was_kept_back(codec: str) -> None:
    def work(rank: Rank) -> list[list[int]]:
        parameters, found = list(rank.parameters.values()), []
        for number, without in enumerate(([0, 1], [0, 1, 2], [], [0, 1]), start=1):
            for index, gradient in enumerate(rank.gradients(number)):
                # Of the third, the last rank alone has none in the first round.
                alone = index == 2 and number == 1 and rank.number == WORLD - 1
                parameters[index].grad = None if index in without or alone else gradient
            rank.reduced()
            found.append([index for index, parameter in enumerate(parameters) if parameter.grad is None])
        return found

    kept_back = codec == "topk"
    expected = [[0, 1], [0, 1] if kept_back else [0, 1, 2], [], [1] if kept_back else [0, 1]]
    assert on_ranks(work, codec, full_sync_every=4) == [expected] * WORLD


def test_weights_of_any_shape_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.zeros(0))
            self.weight = nn.Parameter(torch.ones(70, 70))

    monkeypatch.setattr("tests.support.exchange.thread_ranks.model_of", lambda _: Odd())

    def work(rank: Rank) -> int:
        rank.reduce(1)
        return rank.reducer.rounds

    assert on_ranks(work, "none", check_every=1) == [1] * WORLD


@pytest.mark.parametrize("window", [0, 1000])
def test_each_ranks_gradient_is_clipped_before_dgc_accumulates_it(window: int) -> None:
    clip = 0.5

    def work(rank: Rank) -> float:
        if window:
            for number in range(1, 30):  # three explosions in a row, and compression is off for the window
                rank.reduce(number, scale=1e-9 if number < 24 else 1.0)
        for parameter in rank.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        if rank.number == 0:
            rank.parameters["0.weight"].grad = torch.full_like(rank.parameters["0.weight"], 3.0)
        return float(torch.linalg.vector_norm(rank.reduced()))

    policy = {"anomaly": {"window": window, "times": 3}}
    found = on_ranks(work, "dgc", clip=clip, ratio=1.0, momentum=0.0, policy=policy)
    assert found == pytest.approx([clip / WORLD**0.5] * WORLD, rel=1e-2)


def test_the_caller_clips_sums_unless_the_codec_clips_what_it_accumulates() -> None:
    assert on_ranks(lambda rank: rank.reducer.clips_sums, "dgc") == [False] * WORLD
    assert on_ranks(lambda rank: rank.reducer.clips_sums, "topk") == [True] * WORLD


def test_ranks_whose_weights_have_parted_are_told() -> None:
    def work(rank: Rank) -> bool:
        if rank.number == 2:
            rank.parameters["0.weight"].data[0, 0] += 1e-6
        rank.reduce(1)
        with pytest.raises(RanksDiverged, match="round 2"):
            rank.reduce(2)
        return True

    assert on_ranks(work, "qsgd", check_every=2) == [True] * WORLD


def test_a_round_in_which_everything_is_sent_leaves_nothing_behind() -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor]:
        sums = [rank.reduce(number) for number in (1, 2, 3)]
        return torch.stack(sums).sum(0), sum((rank.plain_sum(n) for n in (1, 2, 3)), start=torch.zeros(1))

    for got, wanted in on_ranks(work, "topk", full_sync_every=3):
        # bfloat16 rounds what is sent; that alone is kept back.
        assert float((got - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("codec", ["topk", "qsgd", "double_quantization"])
def test_what_came_too_late_is_sent_later_and_a_sum_is_divided_by_those_who_are_in_it(codec: str) -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor]:
        rank.link.late = lambda number: rank.number == 1 and number == 2
        sums = [rank.reduce(number) for number in (1, 2, 3)]
        # The second sum has the parts of all ranks but one, and is as large as that of all would be.
        sums[1] *= (WORLD - 1) / WORLD
        return torch.stack(sums).sum(0), sum((rank.plain_sum(n) for n in (1, 2, 3)), start=torch.zeros(1))

    [(got, wanted), *others] = on_ranks(work, codec, full_sync_every=3)
    assert float((got - wanted).norm() / wanted.norm()) < 3e-2
    assert all(torch.equal(got, other) for other, _ in others)


@pytest.mark.parametrize("codec", ["topk", "qsgd"])
def test_gradients_of_a_late_rank_that_are_not_finite_reach_neither_the_others_nor_its_residual(codec: str) -> None:
    def work(rank: Rank) -> Tensor:
        rank.link.late = lambda number: rank.number == 1 and number == 2
        rank.reduce(1)
        for parameter, gradient in zip(rank.parameters.values(), rank.gradients(2), strict=True):
            parameter.grad = gradient * float("nan") if rank.number == 1 else gradient
        return torch.stack([rank.reduced(), rank.reduce(3), rank.reduce(4)])

    first, *others = on_ranks(work, codec)
    assert bool(first.isfinite().all())
    assert all(torch.equal(first, other) for other in others)


def test_what_came_too_late_is_part_of_a_checkpoint() -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor]:
        rank.link.late = lambda number: rank.number == 1 and number == 2
        sums = [rank.reduce(1), rank.reduce(2) * (WORLD - 1) / WORLD]
        states = rank.link.told(rank.reducer.state())
        rank.reducer.restore(states)
        sums.append(rank.reduce(3))
        return torch.stack(sums).sum(0), sum((rank.plain_sum(n) for n in (1, 2, 3)), start=torch.zeros(1))

    for got, wanted in on_ranks(work, "qsgd"):
        assert float((got - wanted).norm() / wanted.norm()) < 3e-2


def test_a_rank_whose_part_was_missed_has_the_same_gradients_as_all_others() -> None:
    def work(rank: Rank) -> list[Tensor | None]:
        rank.link.missing = rank.number == 1
        parameters = list(rank.parameters.values())
        for index, gradient in enumerate(rank.gradients(1)):
            parameters[index].grad = gradient if rank.number == 1 or index > 1 else None
        rank.reduced()
        return [parameter.grad for parameter in parameters]

    first, *others = on_ranks(work, "none")
    assert [one is None for one in first] == [True, True, False, False, False, False]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one is two is None or (one is not None and two is not None and torch.equal(one, two))


def test_the_same_buckets_travel_together_on_all_ranks_however_much_is_sent_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fulmen_exchange.layout.BUCKET_BYTES", 1)
    monkeypatch.setattr("fulmen_exchange.bucket_sums.WAVE_BYTES", 20_000)

    def work(rank: Rank) -> tuple[list[tuple[int, ...]], Tensor]:
        for parameter, gradient in zip(rank.parameters.values(), rank.gradients(1), strict=True):
            # All of what one rank has reaches the threshold, and is sent: ten times what the others send.
            parameter.grad = torch.ones_like(gradient) if rank.number == 1 else gradient
        first = rank.reduced()
        return rank.link.waves, torch.stack([first, rank.reduce(2)])

    found = on_ranks(work, "topk", ratio=10.0, full_sync_every=2)
    for waves, sums in found:
        assert waves == [(0, 1), (0,), (1,)], "in the second round everything is sent"
        assert torch.equal(sums, found[0][1])


def test_a_single_rank_goes_through_the_codec_as_well() -> None:
    def work(rank: Rank) -> Tensor:
        return torch.stack([rank.reduce(number) - rank.plain_sum(number) for number in (1, 2)]).sum(0)

    [left] = on_ranks(work, "topk", world=1, full_sync_every=2)
    assert float(left.abs().max()) < 0.1


class TestMomentum:
    """Whatever dgc's rounds go through, the momentum of SGD is in them."""

    ROUNDS = 12
    CLIP = 1e9

    def wanted(self, rank: Rank) -> list[Tensor]:
        """Computes what SGD with momentum would move the weights by, in float64."""
        buffer, moves = torch.zeros_like(rank.plain_sum(1)).double(), []
        for number in range(1, self.ROUNDS + 1):
            buffer = 0.9 * buffer + rank.plain_sum(number).double()
            moves.append(buffer)
        return moves

    def test_a_policy_that_never_compresses_is_sgd_with_momentum(self) -> None:
        def work(rank: Rank) -> bool:
            # Without seconds measured, `auto` would go through ways in turn; one that asks for many rounds of each stays.
            sums = [rank.reduce(number) for number in range(1, self.ROUNDS + 1)]
            return all(
                torch.allclose(one.double(), wanted, atol=1e-4)
                for one, wanted in zip(sums, self.wanted(rank), strict=True)
            )

        assert on_ranks(work, "dgc", clip=self.CLIP, policy={"kind": "auto", "probe_rounds": 100}) == [True] * WORLD

    @pytest.mark.parametrize(
        "policy",
        [
            # None, bf16, 8 and 4 bits, then dgc itself, and whatever is the quickest.
            {"kind": "auto", "probe_rounds": 1, "ratios": [4096.0], "measure_every": 0},
            {"kind": "auto", "probe_rounds": 2, "ratios": [4096.0], "measure_every": 0},
            {"kind": "fixed"},
        ],
    )
    def test_ways_that_follow_each_other_lose_no_momentum(self, policy: dict[str, object]) -> None:
        def work(rank: Rank) -> tuple[Tensor, Tensor]:
            sums = [rank.reduce(number) for number in range(1, self.ROUNDS + 1)]
            return torch.stack(sums).double().sum(0), torch.stack(self.wanted(rank)).sum(0)

        # Of so few numbers that are sent, masking stops hardly any momentum.
        for got, wanted in on_ranks(work, "dgc", clip=self.CLIP, ratio=4096.0, full_sync_every=4, policy=policy):
            # 4 bits are off by some hundredths; without the momentum, the sum would be off by its nine tenths.
            assert float((got - wanted).norm() / wanted.norm()) < 0.1

    def test_a_window_without_compression_loses_no_momentum(self) -> None:
        calm, rounds = 22, 40

        def scale(number: int) -> float:
            return 1.0 if number <= calm else 1e4

        def work(rank: Rank) -> tuple[Tensor, Tensor, int]:
            buffer, wanted, got = torch.zeros(()), torch.zeros(()), torch.zeros(())
            for number in range(1, rounds + 1):
                got = got + rank.reduce(number, scale=scale(number)).double()
                buffer = 0.9 * buffer + rank.plain_sum(number).double() * scale(number)
                wanted = wanted + buffer
            off = [text for text in rank.reducer.drain().events if "compression off" in text]
            return got, wanted, len(off)

        policy = {"anomaly": {"window": 5, "times": 2}}
        for got, wanted, times in on_ranks(
            work, "dgc", clip=self.CLIP, ratio=4096.0, full_sync_every=rounds, policy=policy
        ):
            assert times == 1
            assert float((got - wanted).norm() / wanted.norm()) < 0.05

    def test_what_is_not_compressed_has_momentum_too(self) -> None:
        def work(rank: Rank) -> bool:
            sums = [rank.reduce(number) for number in range(1, self.ROUNDS + 1)]
            biases = [slice(11700, 11790), slice(18090, 18160)]
            return all(
                torch.allclose(one[part].double(), wanted[part], atol=1e-4)
                for one, wanted in zip(sums, self.wanted(rank), strict=True)
                for part in biases
            )

        assert on_ranks(work, "dgc", clip=self.CLIP, ratio=50.0) == [True] * WORLD
