"""Buckets that are summed while the backward pass computes the gradients of others: the very steps that they make without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fulmen_exchange import layout
from fulmen_exchange.registry import load_codecs
from tests.support.exchange import hook_ranks, overlap_ranks
from tests.support.exchange.hook_ranks import RankPool
from tests.support.soak import long_but

pytestmark = [pytest.mark.long(short=True), pytest.mark.serial]
STEPS = 8
Run = Callable[..., list[Any]]
NO_CLIP: dict[str, dict[str, Any]] = {"dgc": {"clip": 0.0}}


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


@pytest.mark.parametrize(
    ("codec", "ranks"),
    long_but(
        [("dgc", 2), ("masked", 2), ("powersgd", 2), ("topk", 4)],
        [*((name, 2) for name in sorted(load_codecs())), ("topk", 4), ("qsgd", 4)],
    ),
)
def test_the_steps_are_those_without_overlap_bit_for_bit(run: Run, codec: str, ranks: int) -> None:
    settings = {"check_every": 3, **NO_CLIP.get(codec, {})}
    after, during = (
        run(ranks, overlap_ranks.train_in_buckets, codec, settings, STEPS, {"overlap": overlap})
        for overlap in (False, True)
    )
    # Each of the large matrices is a bucket of its own; `masked` has the small parameters in buckets, too.
    assert during[0]["layout"] == (8 if codec == "masked" else 3)
    assert [one["digests"] for one in during] == [one["digests"] for one in after]
    assert len(set(during[0]["digests"])) == STEPS
    assert during[0]["sent"] == after[0]["sent"]


@pytest.mark.parametrize(
    "mode",
    long_but(
        [{"find_unused_parameters": True}],
        [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ),
)
def test_it_is_so_however_ddp_is_set(run: Run, mode: dict[str, Any]) -> None:
    after, during = (
        run(2, overlap_ranks.train_in_buckets, "topk", {}, STEPS, {"overlap": overlap, **mode})
        for overlap in (False, True)
    )
    assert [one["digests"] for one in during] == [one["digests"] for one in after]


def test_a_bucket_is_summed_before_the_gradients_of_the_first_layer_are_there(run: Run) -> None:
    for order in run(2, overlap_ranks.order_of_sums):
        assert order.index("bucket 2 summed") < order.index("gradient of layer 0")
        assert order.index("gradient of layer 0") < order.index("bucket 0 summed")


def test_dgc_clips_to_the_norm_of_the_step_before_and_never_less_than_that_of_what_is_there(run: Run) -> None:
    [norms, clipped], _ = run(2, overlap_ranks.clip_overlapped)
    limit = 1.0 / 2**0.5
    # The first step knows all its gradients. Buckets come from the last to the first.
    for step, (of_buckets, found) in enumerate(zip(norms, clipped, strict=True)):
        so_far = 0.0
        whole = float(np.linalg.norm(of_buckets))
        before = float(np.linalg.norm(norms[step - 1])) if step else whole
        for norm, is_now in zip(reversed(of_buckets), reversed(found), strict=True):
            so_far = float(np.hypot(so_far, norm))
            by = max(before, so_far if step else whole)
            assert is_now == pytest.approx(norm * min(1.0, limit / by), rel=1e-4)
    assert max(map(np.linalg.norm, norms)) > limit, "something was clipped"


@pytest.mark.parametrize("codec", long_but(["dgc", "powersgd"], sorted(load_codecs())))
@pytest.mark.parametrize("of_last", [True, False])
def test_a_gradient_that_is_not_finite_leaves_all_states_as_they_were(run: Run, codec: str, of_last: bool) -> None:
    after, during = (run(2, hook_ranks.meet_infinity, codec, overlap, of_last) for overlap in (False, True))
    assert during == after
    for finite, rounds, _ in during:
        assert (finite, rounds) == ([True, True, False, True, True], 4)


@pytest.mark.parametrize("codec", long_but(["powersgd"], ["dgc", "topk", "powersgd"]))
def test_from_a_checkpoint_ranks_go_on_bit_for_bit(run: Run, codec: str) -> None:
    for unbroken, resumed in run(2, overlap_ranks.go_on_overlapped, codec, STEPS):
        assert resumed == unbroken


def test_ranks_with_more_rows_and_those_of_a_part_of_all_processes_overlap_too(run: Run) -> None:
    assert run(2, hook_ranks.train_unevenly, "topk", True) == run(2, hook_ranks.train_unevenly, "topk", False)
    of_four = run(4, hook_ranks.train_two_of_four, True)
    assert of_four == run(4, hook_ranks.train_two_of_four, False)
    assert of_four[1] == of_four[3] != ""


@pytest.mark.parametrize(
    ("codec", "ranks", "shard"),
    long_but([("powersgd", 4, 2)], [("topk", 2, 1), ("qsgd", 4, 2), ("dgc", 4, 2), ("powersgd", 4, 2)]),
)
def test_copies_of_an_fsdp2_model_take_the_same_steps_too(run: Run, codec: str, ranks: int, shard: int) -> None:
    settings = NO_CLIP.get(codec, {})
    after, during = (
        run(ranks, overlap_ranks.train_copies, codec, settings, shard, overlap) for overlap in (False, True)
    )
    assert during == after
    assert len(set(during[0])) == 5
    for part in range(shard):
        assert all(during[rank] == during[part] for rank in range(part, ranks, shard)), "copies have the same weights"


def test_a_second_gradient_of_one_step_is_refused_with_what_to_do(run: Run) -> None:
    assert "set_requires_gradient_sync(False)" in run(1, overlap_ranks.second_gradient)[0]


def test_a_policy_that_goes_by_seconds_is_refused(run: Run) -> None:
    [said] = run(1, overlap_ranks.refused_overlap)
    assert "overlap: the policy must be fixed or stages" in said


def test_a_bucket_is_as_large_as_elsewhere() -> None:
    assert layout.BUCKET_BYTES == 25 * 2**20, "tests that make it smaller do so in processes of their own"
