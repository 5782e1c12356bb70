"""Rules of how much is sent: a ratio of a rank's own, a threshold below which nothing is sent, small norms, growing ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulmen_exchange.codecs.codec import Round
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.policies.policy import make_policy
from fulmen_exchange.policies.settings import FixedPolicy, QuietSettings, Stage, StagesPolicy
from fulmen_exchange.registry import load_codecs
from tests.support.exchange.codec_cases import segment
from tests.support.exchange.policy_world import calm
from tests.support.exchange.thread_ranks import Rank, on_ranks

CODECS = ["topk", "topk_quantised", "dgc"]
SIZE = 400_000
NO_MOMENTUM: dict[str, dict[str, Any]] = {"dgc": {"momentum": 0.0}}


@pytest.mark.parametrize("codec", CODECS)
def test_a_rank_with_a_narrow_line_sends_less_than_the_others_and_all_get_one_sum(codec: str) -> None:
    def work(rank: Rank) -> tuple[torch.Tensor, int]:
        rank.reducer._exchanger._settings = rank.reducer._settings.model_copy(
            update={
                "link": rank.reducer._settings.link.model_copy(update={"ratio_factor": 4.0 if rank.number else 1.0})
            }
        )
        return rank.reduce(1), rank.link.up_bytes

    more: dict[str, Any] = {"ratio": 8.0, **({"clip": 0.0} if codec == "dgc" else {})}
    (sum_, wide), *others = on_ranks(work, codec, **more)
    for other, narrow in others:
        assert torch.equal(other, sum_)
        assert narrow < wide


def test_servers_do_not_mind_that_ratios_of_ranks_differ() -> None:
    settings = load_codecs()["topk"].settings
    one, other = (
        settings(link=GrpcLinkSettings(targets=("a:1",), ratio_factor=factor)).model_dump_json(exclude={"link"})
        for factor in (1.0, 4.0)
    )
    assert one == other


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_sends_by_the_ranks_own_ratio(codec: str) -> None:
    made, gradient = segment(codec), torch.randn(SIZE)
    sizes = []
    for factor in (1.0, 4.0):
        round_ = Round(number=1, ratio=25.0, ratio_factor=factor)
        [payload] = made.encode(gradient.clone(), made.new_state(gradient), [0, SIZE], round_)
        sizes.append(payload.nbytes)
    assert sizes[0] / sizes[1] == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_below_the_threshold_is_sent_until_a_flush_and_none_is_lost(codec: str) -> None:
    made = segment(codec, min_threshold=1e-6, **NO_MOMENTUM.get(codec, {}))
    gradient = torch.full((SIZE,), 4e-7)
    gradient[:10] = 1.0
    state, sent = made.new_state(gradient), torch.zeros(SIZE)
    [payload] = made.encode(gradient.clone(), state, [0, SIZE], Round(number=1, ratio=20.0))
    made.add(payload, sent)
    assert sent[:10].tolist() == [1.0] * 10
    assert not bool(sent[10:].any()), "5 % were asked for, and are below"
    # What is small is sent once it has added up.
    again = torch.zeros(SIZE)
    for number in (2, 3):
        [payload] = made.encode(torch.full((SIZE,), 4e-7), state, [0, SIZE], Round(number=number, ratio=20.0))
        made.add(payload, again)
    assert bool((again[10:] > 1e-6).any())
    [payload] = made.encode(torch.zeros(SIZE), state, [0, SIZE], Round(number=4, ratio=20.0, flush=True))
    made.add(payload, again)
    torch.testing.assert_close(again[10:], torch.full((SIZE - 10,), 1.2e-6), rtol=0.01, atol=0.0)


def ratios(policy: FixedPolicy | StagesPolicy, norms: list[float]) -> list[float]:
    """Returns the ratio of each round, by the norm of its gradients."""
    settings = load_codecs()["topk"].settings(ratio=100.0, policy=policy)
    made = make_policy(settings, optimizer="sgd", world_size=2, gradient_bytes=4e6)
    return [
        made.decide(calm(number, gradient_norms=(norm, norm / 2))).choice.ratio or 1.0
        for number, norm in enumerate(norms, start=1)
    ]


def test_small_norms_are_compressed_harder_after_the_warm_up() -> None:
    quiet = QuietSettings(below=1e-3, factor=4.0)
    assert ratios(FixedPolicy(warmup_rounds=0, quiet=quiet), [1.0, 9e-4, 2e-3, 1e-5]) == [100.0, 400.0, 100.0, 400.0]
    assert ratios(FixedPolicy(warmup_rounds=4, quiet=quiet), [1e-5] * 5) == [4.0, 16.0, 64.0, 100.0, 400.0]
    assert ratios(FixedPolicy(warmup_rounds=0), [1e-9, 1e-9]) == [100.0, 100.0], "not unless it is asked for"


def test_ratios_grow_within_a_stage() -> None:
    stages = (Stage(until_progress=0.3, ratio=(50, 100, 200)), Stage(until_progress=1.0, ratio=10))  # type: ignore[arg-type]
    policy = StagesPolicy(kind="stages", warmup_rounds=0, stages=stages)
    settings = load_codecs()["topk"].settings(policy=policy)
    made = make_policy(settings, optimizer="sgd", world_size=2, gradient_bytes=4e6)
    found = [
        made.decide(calm(number, progress=progress)).choice.ratio
        for number, progress in enumerate((0.0, 0.09, 0.11, 0.19, 0.21, 0.29, 0.3, 1.0), start=1)
    ]
    assert found == [50, 50, 100, 100, 200, 200, 10, 10]
