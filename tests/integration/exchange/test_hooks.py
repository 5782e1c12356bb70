"""Torch's own DDP with its gradients through a codec: real ranks, several buckets, and what plain DDP makes of the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fulmen_exchange.registry import load_codecs
from tests.support.exchange import hook_ranks
from tests.support.exchange.dgc import bfloat16, published
from tests.support.exchange.hook_ranks import RankPool, settings_of
from tests.support.soak import long_but

pytestmark = [pytest.mark.long(short=True), pytest.mark.serial]
STEPS = 12
MODES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "gradients are views": {"gradient_as_bucket_view": True},
    "unused parameters are looked for": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
AT_ONCE = {"kind": "fixed", "warmup_rounds": 0, "anomaly": {"window": 0}}
"""A policy that asks for the codec's own ratio in every round."""
Run = Callable[..., list[Any]]
Plain = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Yields processes for four ranks."""
    found = RankPool(4)
    yield found
    found.close()


@pytest.fixture
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns what does something on so many ranks at once."""
    return lambda size, work, *arguments: pool.run(tmp_path_factory.mktemp("ranks"), size, work, *arguments)


def agree(of_ranks: list[Any]) -> bool:
    """True if all ranks had the same weights after each step."""
    return len(of_ranks[0]["digests"]) > 0 and all(one["digests"] == of_ranks[0]["digests"] for one in of_ranks)


@pytest.fixture(scope="module")
def plain(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Returns what DDP without a hook comes to, by the number of ranks."""
    found = {}
    for size in (2, 4):
        of_ranks = pool.run(tmp_path_factory.mktemp("ranks"), size, hook_ranks.train, "ddp", {}, STEPS, {})
        assert agree(of_ranks)
        found[size] = of_ranks[0]
    return found


@pytest.mark.parametrize("mode", long_but(["as usual", "unused parameters are looked for"], MODES))
def test_uncompressed_two_ranks_take_the_very_steps_of_plain_ddp(run: Run, plain: Plain, mode: str) -> None:
    # Every other step in two passes, of which the first sums nothing.
    found = run(2, hook_ranks.train, "none", {}, STEPS, MODES[mode])
    assert agree(found)
    assert found[0]["digests"] == plain[2]["digests"]
    assert found[0]["buckets"] >= 3
    assert found[0]["rounds"] == STEPS


def test_uncompressed_four_ranks_take_the_steps_of_plain_ddp_but_for_rounding(run: Run, plain: Plain) -> None:
    found = run(4, hook_ranks.train, "none", {}, STEPS, {})
    assert agree(found)
    np.testing.assert_allclose(found[0]["weights"], plain[4]["weights"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "ranks"),
    long_but(
        [("dgc", 2), ("masked", 2), ("powersgd", 2), ("topk", 4)],
        [*((name, 2) for name in sorted(load_codecs())), ("topk", 4), ("powersgd", 4)],
    ),
)
def test_with_every_codec_all_ranks_have_the_same_weights_after_each_step(run: Run, codec: str, ranks: int) -> None:
    found = run(ranks, hook_ranks.train, codec, {"check_every": 5}, STEPS, {})
    assert agree(found)
    assert len(set(found[0]["digests"])) == found[0]["rounds"] == STEPS
    assert found[0]["losses"][-1] < 0.8 * found[0]["losses"][0]
    assert found[0]["metrics"]["exchange_raw_bytes"] > 0


@pytest.mark.parametrize("codec", long_but(["dgc"], ["topk", "dgc", "powersgd"]))
def test_from_a_checkpoint_ranks_go_on_bit_for_bit(run: Run, codec: str) -> None:
    # DDP's buckets are those of the first pass again.
    unbroken, resumed = run(2, hook_ranks.go_on, codec, {"policy": AT_ONCE}, 12)[0]
    assert len(resumed) == 6
    assert resumed == unbroken


def numbers(seed: int, shape: tuple[int, int]) -> Any:
    """Makes a gradient with heavy tails, float32."""
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def test_dgc_takes_the_published_steps_bit_for_bit(run: Run) -> None:
    shapes, ratio, momentum = ((130, 90), (100, 80)), 20.0, 0.9
    gradients = [[[numbers(10 * step + rank, s) for s in shapes] for rank in range(2)] for step in range(STEPS)]
    settings = settings_of("dgc", ratio=ratio, momentum=momentum, clip=1e9, policy=AT_ONCE)
    of_ranks = run(2, hook_ranks.give, settings, gradients, {"find_unused_parameters": True})
    flat = [[np.concatenate([one.ravel() for one in of_rank]) for of_rank in step] for step in gradients]
    for step, expected in enumerate(published_steps(flat, ratio, momentum)):
        assert all(np.array_equal(found[step], expected) for found in of_ranks), step


def largest(ratio: float) -> Callable[[Any], Any]:
    """Returns what says which elements are sent: as many as the ratio asks for, the largest first."""

    def chosen(of: Any) -> Any:
        keep = round((4 / ratio - 2 / 4096) / 4 * of.size)
        return np.abs(of) >= np.sort(np.abs(of))[-keep]

    return chosen


def published_steps(gradients: list[list[Any]], ratio: float, momentum: float) -> Iterator[Any]:
    """Yields the weights after each step of DGC between ranks, float32: each sends a part of its share of the average.

    All that any rank has sent is applied, rounded to bfloat16.
    """
    size = gradients[0][0].size
    states = [(np.zeros(size, np.float32), np.zeros(size, np.float32)) for _ in gradients[0]]
    weights = np.zeros(size, np.float32)
    for of_ranks in gradients:
        total = np.zeros(size, np.float32)
        for rank, gradient in enumerate(of_ranks):
            share = gradient / np.float32(len(of_ranks))
            u, v, out = published(*states[rank], share, momentum, nesterov=False, sent=largest(ratio))
            states[rank] = u, v.astype(np.float32)
            total += out.astype(np.float32)
        weights = weights - bfloat16(total).astype(np.float32)
        yield weights


def test_dgc_clips_a_ranks_share_of_all_gradients_of_all_buckets(run: Run) -> None:
    shapes, clip = ((130, 90), (100, 80)), 0.5
    gradients = [[[numbers(rank + 1, shape) * rank for shape in shapes] for rank in range(2)]]
    settings = settings_of("dgc", ratio=1.0, clip=clip, policy=AT_ONCE)
    [found], _ = run(2, hook_ranks.give, settings, gradients, {"find_unused_parameters": True})
    # Only rank 1 had a gradient; nearly all of it is sent.
    assert np.linalg.norm(found) == pytest.approx(clip / 2**0.5, rel=1e-2)


@pytest.mark.parametrize("matrix_rank", long_but([4], [1, 4]))
def test_powersgd_takes_the_steps_of_torchs_own_hook(run: Run, matrix_rank: int) -> None:
    shape = (48, 36)
    # Theirs begins after two steps. Then a sum of this very rank, whose rows are what both go on with, wherever they begin.
    rows = numbers(1, (matrix_rank, shape[1]))
    first = [[numbers(2 + rank, (shape[0], matrix_rank)) @ rows] for rank in range(2)]
    nothing = [[np.zeros(shape, np.float32)]] * 2
    gradients = [nothing, nothing, first]
    gradients += [[[numbers(10 * step + rank, shape)] for rank in range(2)] for step in range(1, STEPS)]
    for theirs, ours in run(2, hook_ranks.give_to_powersgd, matrix_rank, gradients):
        assert np.abs(theirs[-1]).max() > 1.0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("zeros", [False, True], ids=["none", "zeros"])
@pytest.mark.parametrize("views", long_but([True], [False, True]), ids=["copies", "views"])
def test_of_a_parameter_that_is_not_always_used_nothing_is_lost(run: Run, views: bool, zeros: bool) -> None:
    shapes, steps = ((70, 60), (80, 60)), 18

    def of(step: int, rank: int) -> list[Any]:
        # The second one is used by both, by rank 0, by none, and so on; by none when all that was kept back is sent.
        used = (True, rank == 0, False)[step % 3]
        return [numbers(10 * step + rank, shapes[0]), numbers(10 * step + rank + 5, shapes[1]) if used else None]

    gradients = [[of(step, rank) for rank in range(2)] for step in range(steps)]
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    settings = settings_of("topk", ratio=20.0, full_sync_every=steps, policy=AT_ONCE)
    plain = run(2, hook_ranks.give, None, gradients, ddp, zeros)
    found = run(2, hook_ranks.give, settings, gradients, ddp, zeros)
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0][-2] - plain[0][-2]).max() > 1.0
    # What is sent is rounded to 8 bits.
    np.testing.assert_allclose(found[0][-1], plain[0][-1], rtol=0, atol=2**-8 * np.abs(plain[0][-1]).max())


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all_and_goes_into_no_state(run: Run) -> None:
    for finite, rounds, digests in (found := run(2, hook_ranks.meet_infinity)):
        assert (finite, rounds) == ([True, True, False, True, True], 4)
        assert digests == found[0][2]


@pytest.mark.parametrize("codec", long_but(["dgc"], ["topk", "dgc", "qsgd"]))
def test_a_loss_scale_that_changes_makes_no_difference(run: Run, codec: str) -> None:
    settings = {"ratio": 10.0} if codec != "qsgd" else {}
    (plain, [one, *_]), (other, _) = run(2, hook_ranks.train_with_scale, codec, settings, False)
    (scaled, scales), _ = run(2, hook_ranks.train_with_scale, codec, settings, True)
    assert (one, len(set(scales))) == (1.0, 3), "it grew twice"
    assert len(set(plain)) == len(plain)
    assert scaled == plain == other


def test_dgc_without_clipping_sends_all_of_a_gradient(run: Run) -> None:
    gradients = [[[numbers(rank + 1, (130, 90)) * 100] for rank in range(2)]]
    settings = settings_of("dgc", ratio=1.0, clip=0, policy=AT_ONCE)
    [found], _ = run(2, hook_ranks.give, settings, gradients, {})
    average = (gradients[0][0][0] + gradients[0][1][0]).ravel() / 2
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(average), rel=1e-2)


def test_a_rank_that_has_rows_for_longer_is_joined_by_the_others(run: Run) -> None:
    plain, none, topk = (run(2, hook_ranks.train_unevenly, codec) for codec in ("ddp", "none", "topk"))
    assert none == plain
    assert topk[0] == topk[1] != plain[0]


def test_ranks_of_a_group_that_is_not_all_processes_exchange_among_themselves(run: Run) -> None:
    found = run(4, hook_ranks.train_two_of_four)
    assert found[1] == found[3] != ""


def test_the_policy_is_told_of_progress(run: Run) -> None:
    first, middle, last = run(2, hook_ranks.train_on_progress)[0]
    assert middle > first > last


def test_what_cannot_have_the_hook_is_refused_with_what_to_do_instead(run: Run) -> None:
    said = run(1, hook_ranks.refusals)[0]
    for name, wanted in {
        "fsdp2": "use register_fsdp2 between copies",
        "no ddp": "Layers is not wrapped in DistributedDataParallel",
        "link": "kind torch",
        "outer": "DDP sums the gradients of every step",
        "adamw": "topk requires SGD",
        "momentum": "the optimiser's momentum must be 0",
        "sparse": "sparse=True",
    }.items():
        assert wanted in said[name]
