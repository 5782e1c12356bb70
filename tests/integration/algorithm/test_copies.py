"""Several copies of the weights, in parts: their sums, and codecs between them, on four real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fulmen_algorithm.training.compute import Balance, Ddp, Fsdp2
from fulmen_algorithm.training.settings import AdamW, Sgd
from fulmen_exchange.registry import load_codecs
from tests.support.algorithm import copies
from tests.support.algorithm.copies import Case
from tests.support.algorithm.trainers import model_dir, rows
from tests.support.exchange.hook_ranks import RankPool, settings_of
from tests.support.soak import long_but

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until processes with torch have started
]

HYBRID = Fsdp2(ranks=4, shard=2)
SMALL = {"dense_below": 16, "policy": {"kind": "fixed", "warmup_rounds": 0}}
"""The matrices of a tiny model are compressed, too, at the codec's own ratio."""
COPIES, PARTS = ((0, 2), (1, 3)), ((0, 1), (2, 3))
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Yields processes for four ranks."""
    found = RankPool(4, copies.__name__)
    yield found
    found.close()


@pytest.fixture
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns what does something on all ranks of a case at once."""

    def on_ranks(work: Callable[..., Any], case: Case, *arguments: Any) -> list[Any]:
        return pool.run(tmp_path_factory.mktemp("ranks"), case.parallel.ranks, work, case, *arguments)

    return on_ranks


@pytest.fixture(scope="module")
def case(model_dir, rows) -> Case:
    return Case(model_dir=model_dir, rows=rows, parallel=HYBRID)


def test_sums_over_copies_are_those_of_torchs_own_hybrid_sharding_bit_for_bit(run, case):
    for of_rank in run(copies.sums_and_torchs_own, case):
        assert all(same for same, _ in of_rank)
        assert sum(elements for _, elements in of_rank) > 0


def test_an_exchange_without_a_codec_takes_the_same_steps_bit_for_bit(run, case):
    plain = run(copies.train, case, 3)
    exchanged = run(copies.train, replace(case, exchange=settings_of("none", **SMALL)), 3)
    assert [one["digests"] for one in exchanged] == [one["digests"] for one in plain]


@pytest.mark.parametrize("codec", long_but(["dgc", "masked", "powersgd"], load_codecs()))
def test_copies_hold_the_same_bits_after_each_step(codec, run, case):
    settings = settings_of(codec, **SMALL)
    rule = Sgd() if settings.sgd_only else AdamW()
    found = run(copies.train, replace(case, exchange=settings, rule=rule), 3)
    for one, other in COPIES:
        assert found[one]["digests"] == found[other]["digests"]
        assert len(set(found[one]["digests"])) == 3
    for one, other in PARTS:
        assert found[one]["digests"] != found[other]["digests"]
    assert len({tuple(one["norms"]) for one in found}) == 1
    assert all(one["sent_bytes"] > 0 for one in found)


@pytest.mark.long
def test_a_sparse_codec_between_copies_learns_as_it_does_between_ranks_with_all_weights(run, case):
    settings = settings_of("dgc", ratio=10.0, **SMALL)
    sparse = replace(case, exchange=settings, rule=Sgd(), learning_rate=0.1)
    hybrid = run(copies.train, sparse, 40)[0]["losses"]
    ddp = run(copies.train, replace(sparse, parallel=Ddp(ranks=2)), 40)[0]["losses"]
    assert hybrid[0] == pytest.approx(ddp[0], abs=1e-5)
    fallen = ddp[0] - ddp[-1]
    assert fallen > 0.3
    for one, other in zip(hybrid[20:], ddp[20:], strict=True):
        assert one == pytest.approx(other, abs=0.1 * fallen)


def test_clipping_before_a_codec_is_by_the_norm_of_all_parts(run, case):
    settings = settings_of("dgc", ratio=1.0, clip=0.01, momentum=0.0, **SMALL)
    # The rows are alike, so whoever has them, each copy's gradient is the same before it is clipped.
    clipped = replace(case, exchange=settings, rule=Sgd(), learning_rate=0.1, rows=[case.rows[0]] * 4)
    hybrid, ddp = [run(copies.train, replace(clipped, parallel=parallel), 3)[0] for parallel in (HYBRID, Ddp(ranks=2))]
    assert hybrid["norms"] == pytest.approx(ddp["norms"], rel=1e-4)
    assert hybrid["losses"] == pytest.approx(ddp["losses"], abs=1e-5)


def test_a_slow_rank_gets_less_and_losses_stay_the_same(run, case, tmp_path):
    by_speed = replace(case, parallel=Ddp(ranks=2, balance=Balance.SPEED))
    fast, slow = run(copies.train_with_a_slow_rank, by_speed, 4, tmp_path / "told")
    shares = [mine / (mine + other) for mine, other in zip(slow["positions"], fast["positions"], strict=True)]
    assert shares[0] == pytest.approx(0.5, abs=0.1)
    assert max(shares[1:]) < 0.4
    [alike, _] = run(copies.train, replace(case, parallel=Ddp(ranks=2)), 4)
    assert fast["losses"] == pytest.approx(alike["losses"], abs=1e-5)


@pytest.mark.long
def test_torchs_all_reduce_hook_sees_one_layer_of_one_pass_before_it_is_added(run, case):
    """Why codecs do not use it: docs/decisions/0037-copies-are-summed-after-the-backward-pass.md."""
    for found in run(copies.all_reduce_hook, case):
        (dtype, elements, is_first), (_, _, later) = found["calls"]
        assert dtype == "torch.float32"
        assert elements >= found["held"]
        assert (is_first, later) == (True, False)
        assert found["without_sync"] == 0


@pytest.mark.parametrize(
    "later",
    long_but([Fsdp2(ranks=4, shard=1)], [Ddp(ranks=2), Ddp(ranks=4), Fsdp2(ranks=4, shard=1), HYBRID]),
    ids=lambda each: f"{each.kind}-{each.ranks}",
)
def test_what_is_kept_back_goes_to_any_other_number_of_ranks_and_parts(later, run, case, tmp_path):
    stored, again, back = (tmp_path / name for name in ("stored", "again", "back"))
    sparse = replace(case, exchange=settings_of("topk", ratio=20.0, **SMALL), rule=Sgd())
    for folder in (stored, again, back):
        folder.mkdir()
    run(copies.store_state, sparse, stored, 2)
    run(copies.store_state, replace(sparse, parallel=later), again, 0, stored)
    run(copies.store_state, sparse, back, 0, again)
    wanted = copies.residual_of(stored)
    assert any(bool(one.any()) for one in wanted.values())
    for folder in (again, back):
        found = copies.residual_of(folder)
        assert found.keys() == wanted.keys()
        for name, whole in wanted.items():
            torch.testing.assert_close(found[name], whole, rtol=1e-5, atol=1e-7)
