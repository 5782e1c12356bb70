"""What ranks tell each other before a round, and what a run is told after it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.metrics import LARGEST, SLOTS, Energy, GroupReport, RankReport, gather
from fulmen_exchange.registry import load_codecs
from tests.support.exchange.thread_ranks import Meeting, Rank, ThreadLink, on_ranks

NAMES = ["a", "b", "c"]
TOLD = RankReport(norm=1.0, compute_s=0.0, present=(), means={})


def gathered(*of_ranks: RankReport, numbers: tuple[int, ...] = ()) -> GroupReport:
    """Gathers what ranks tell; all must be told the same."""
    meeting = Meeting(len(of_ranks))

    def alone(place: int) -> GroupReport:
        link = ThreadLink(meeting, place)
        link.rank = numbers[place] if numbers else place
        return gather(of_ranks[place], NAMES, link, torch.device("cpu"))

    with ThreadPoolExecutor(len(of_ranks)) as pool:
        first, *others = pool.map(alone, range(len(of_ranks)))
    assert all(first == other for other in others)
    return first


def test_every_rank_is_told_what_all_have_and_means_of_what_some_know() -> None:
    found = gathered(
        replace(TOLD, norm=3.0, compute_s=0.5, present={"a"}, means={"progress": 0.25, "metric": 1.0}),
        replace(TOLD, norm=0.0, compute_s=2.0, present={"a", "c"}, means={"progress": 0.25}),
        replace(TOLD, norm=4.0, compute_s=1.0, means={"progress": 0.25, "metric": 2.0, "captured": float("nan")}),
    )
    assert found.finite
    assert found.norms[:3] == (3.0, 0.0, 4.0)
    assert found.compute_s == 2.0
    assert found.present == {"a", "c"}
    assert found.means == {"progress": 0.25, "metric": 1.5}


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), 2 * LARGEST])
def test_one_gradient_that_cannot_be_summed_is_enough(norm: float) -> None:
    found = gathered(TOLD, replace(TOLD, norm=norm), TOLD)
    assert not found.finite
    assert all(np.isfinite(found.norms))


def test_the_largest_norm_is_seen_whatever_the_numbers_of_the_ranks() -> None:
    found = gathered(TOLD, replace(TOLD, norm=7.0), replace(TOLD, norm=2.0), numbers=(3, SLOTS + 3, 4000))
    assert max(found.norms) == 8.0, "two ranks that share a place are added up"
    assert sum(found.norms) == 10.0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), share=st.floats(0.01, 1.0))
def test_energies_are_those_of_the_equations(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    came, before = rng.normal(size=1000), rng.normal(size=1000)
    came[:100] = 0.0
    wanted = came + before
    sent = np.where(np.abs(wanted) >= np.quantile(np.abs(wanted), 1 - share), wanted * 1.001, 0.0)
    energy = Energy()
    for part in (slice(0, 300), slice(300, 1000)):
        given_ = {"gradient": came[part], "sent": sent[part], "residual": (wanted - sent)[part]}
        energy.add(**{name: torch.tensor(value, dtype=torch.float32) for name, value in given_.items()})
    norm = np.linalg.norm
    assert energy.means() == pytest.approx(
        {
            "captured": norm(sent) ** 2 / norm(wanted) ** 2,
            "sparsity": 0.1,
            "relative_error": norm(wanted - sent) / norm(wanted),
            "gradient_cosine": wanted @ sent / norm(wanted) / norm(sent),
            "residual_norm": norm(wanted - sent) / norm(came),
        },
        rel=1e-3,
        abs=1e-5,
    )


def test_nothing_is_said_of_gradients_that_are_zeros() -> None:
    energy = Energy()
    energy.add(gradient=torch.zeros(9), sent=torch.zeros(9), residual=None)
    assert energy.means() == {}


@pytest.mark.parametrize(("codec", "sums"), [("none", 3), ("bf16", 3), ("qsgd", 2), ("topk", 2)])
def test_a_round_asks_once_and_sums_what_is_not_compressed_once(codec: str, sums: int) -> None:
    def work(rank: Rank) -> int:
        rank.reduce(1)
        before = rank.link.sums
        rank.reduce(2)
        return rank.link.sums - before

    # The gradients of `none` and `bf16` are one more sum for each bucket, of which there is one.
    assert on_ranks(work, codec, world=2) == [sums] * 2


def test_a_run_is_told_of_bytes_and_seconds_and_of_what_was_measured_in_the_round_before() -> None:
    def work(rank: Rank) -> list[dict[str, float]]:
        found = []
        for number in (1, 2, 3, 4):
            rank.reduce(number)
            found.append(dict(rank.reducer.drain().metrics))
        rank.link.missed_sums = 5
        rank.reduce(5)
        return [*found, dict(rank.reducer.drain().metrics)]

    for metrics in on_ranks(work, "topk", world=2, ratio=20.0, check_every=2):
        compressed, dense = (130 * 90 + 90 * 70) * 4, (90 + 70 + 70 * 3 + 3) * 4
        assert [one["exchange_raw_bytes"] for one in metrics] == [compressed + dense] * 5
        assert all(one["exchange_sent_bytes"] > dense for one in metrics)
        assert all(
            one[f"exchange_{part}_seconds"] > 0 for one in metrics for part in ("encode", "transfer", "decode", "wait")
        )
        assert ["exchange_captured" in one for one in metrics] == [False, False, True, False, True]
        sampled = metrics[2]
        # Error feedback keeps back what is not sent, and a twentieth is sent.
        assert 0.05 < sampled["exchange_captured"] < 0.9
        assert sampled["exchange_gradient_cosine"] == pytest.approx(sampled["exchange_captured"] ** 0.5, rel=1e-2)
        assert sampled["exchange_relative_error"] == pytest.approx((1 - sampled["exchange_captured"]) ** 0.5, rel=1e-2)
        assert sampled["exchange_residual_norm"] > 1
        assert [one["exchange_missed_sums"] for one in metrics] == [0, 0, 0, 0, 5]


@pytest.mark.parametrize("codec", sorted(load_codecs()))
def test_what_is_measured_changes_no_sum(codec: str) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        return [rank.reduce(number) for number in (1, 2, 3)]

    measured = on_ranks(work, codec, world=2, check_every=1)
    plain = on_ranks(work, codec, world=2, check_every=0)
    for one, other in zip(measured[0], plain[0], strict=True):
        assert torch.equal(one, other)


def test_events_are_told_once_and_are_the_same_on_every_rank() -> None:
    def work(rank: Rank) -> list[tuple[str, ...]]:
        found = []
        for number in range(1, 11):
            rank.reduce(number)
            found.append(rank.reducer.drain().events)
        return found

    policy = {"kind": "stages", "stages": [{"until_progress": 1.0, "ratio": 50.0}], "warmup_rounds": 8}
    first, second = on_ranks(work, "topk", world=2, policy=policy)
    assert first == second
    told = [text for texts in first for text in texts]
    assert len(told) == len(set(told)) == 2, "from 4 to 16, and to its own"
