"""Codecs whose tensors are summed: what all ranks get is the sum, as well as the format can say it."""

import numpy as np
import pytest
import torch

from fulmen_exchange.codecs.codec import Round
from fulmen_exchange.codecs.lowrank import Plan, orthonormalise
from tests.support.exchange.codec_cases import gradient, linear, reduced

MATRICES = ((0, 40, 60), (2400, 3, 4), (2412, 40, 60), (4812, 64, 33))
"""Two of one shape, one that low rank is not worth, one of another shape."""
SIZE = 4812 + 64 * 33
LOW_RANK = {
    "powersgd": lambda: linear("powersgd", matrix_rank=3),
    "lowrank_quantised_16": lambda: linear("lowrank_quantised", matrix_rank=3),
    "lowrank_quantised_8": lambda: linear("lowrank_quantised", matrix_rank=3, bits=8),
}


def rounds(number, *, world_size, flush=False):
    """Returns the round of each rank."""
    return lambda rank: Round(number=number, world_size=world_size, rank=rank, seed=11, flush=flush)


def gradients(world_size, number, size=SIZE, scale=1.0):
    """Returns what each rank has, which is alike in part."""
    return [(gradient(size, 1) + gradient(size, 100 * number + rank)) * scale for rank in range(world_size)]


def exact(tensors):
    """Returns a sum in float64."""
    return sum(tensor.double() for tensor in tensors)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize(
    ("name", "scale", "tolerance"),
    [("none", 1.0, 1e-6), ("bf16", 1.0, 2**-8), ("fp16", 1.0, 2**-9), ("fp16", 1e-9, 2**-9), ("fp16", 1e30, 2**-9)],
)
def test_a_cast_sums_as_well_as_its_format_can(name, scale, tolerance, world_size):
    given = gradients(world_size, 1, scale=scale)
    found = reduced(linear(name), given, [{} for _ in given], MATRICES, rounds(1, world_size=world_size))
    assert all(torch.equal(one, found[0]) for one in found)
    error = (found[0].double() - exact(given)).abs()
    # Rounded once by each rank, and at each hop.
    assert bool((error <= world_size * tolerance * sum(each.double().abs() for each in given) + 1e-6 * scale).all())


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38])
def test_sums_of_halves_stay_finite_whatever_the_gradients_are(value):
    given = [torch.tensor([value, -value / 3, 0.0])] * 2
    if value > 1:
        given = [given[0], -given[0]]
    found = reduced(linear("fp16"), given, [{}, {}], [(0, 1, 3)], rounds(1, world_size=2))
    torch.testing.assert_close(found[0], given[0] + given[1], rtol=2**-9, atol=1e-40)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", sorted(LOW_RANK))
def test_what_was_summed_and_what_ranks_keep_back_is_what_was_given(name, world_size):
    codec, states = LOW_RANK[name](), [{} for _ in range(world_size)]
    total, sum_ = torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for number in range(1, 8):
        given = gradients(world_size, number)
        total += exact(given)
        found = reduced(codec, given, states, MATRICES, rounds(number, world_size=world_size))
        assert all(torch.equal(one, found[0]) for one in found)
        sum_ += found[0].double()
        torch.testing.assert_close(sum_ + exact(state["residual"] for state in states), total, rtol=1e-4, atol=2e-3)
    last = gradients(world_size, 8)
    flushed = reduced(codec, last, states, MATRICES, rounds(8, world_size=world_size, flush=True))
    torch.testing.assert_close(sum_ + flushed[0].double(), total + exact(last), rtol=1e-4, atol=2e-3)
    assert not any(state["residual"].any() for state in states)


@pytest.mark.parametrize("name", sorted(LOW_RANK))
def test_a_sum_of_low_rank_is_found_and_what_is_not_worth_it_is_exact(name):
    generator, world_size = torch.Generator().manual_seed(5), 3
    given = []
    right = torch.randn(60, 3, generator=generator)
    for _ in range(world_size):
        flat = torch.randn(SIZE, generator=generator)
        for begin in (0, 2412):
            flat[begin : begin + 2400] = (torch.randn(40, 3, generator=generator) @ right.T).flatten()
        given.append(flat)
    states = [{} for _ in given]
    for number in range(1, 4):
        # Nothing comes from the rounds before but where they have begun to look.
        for state in states:
            state.get("residual", torch.empty(0)).zero_()
        [found, *_] = reduced(LOW_RANK[name](), given, states, MATRICES, rounds(number, world_size=world_size))
    expected = exact(given).float()
    tolerance = {"powersgd": 1e-5, "lowrank_quantised_16": 0.01, "lowrank_quantised_8": 0.2}[name]
    for begin in (0, 2412):
        error = (found - expected)[begin : begin + 2400].norm()
        assert float(error) < tolerance * float(expected[begin : begin + 2400].norm())
    torch.testing.assert_close(found[2400:2412], expected[2400:2412])
    assert not any(state["residual"][2400:2412].any() for state in states)


@pytest.mark.parametrize("name", sorted(LOW_RANK))
def test_a_gradient_that_stays_is_sent_by_and_by(name):
    codec, states, given = LOW_RANK[name](), [{}, {}], gradients(2, 1)
    sum_, expected = torch.zeros(SIZE), exact(given).float()
    errors = []
    for number in range(1, 61):
        sum_ += reduced(codec, given, states, MATRICES, rounds(number, world_size=2))[0]
        errors.append(float((sum_ / number - expected).norm() / expected.norm()))
    assert errors[-1] < 0.2
    assert errors[-1] < errors[29] < errors[9] < errors[0]


@pytest.mark.parametrize("name", sorted(LOW_RANK))
def test_a_matrix_without_gradient_comes_back_when_it_has_one(name):
    codec, states = LOW_RANK[name](), [{}, {}]
    reduced(codec, gradients(2, 1), states, MATRICES, rounds(1, world_size=2))
    codec_states = [{key: tensor.zero_() for key, tensor in state.items()} for state in states]
    zeros = [torch.zeros(SIZE)] * 2
    assert not reduced(codec, zeros, codec_states, MATRICES, rounds(2, world_size=2))[0].any()
    found = reduced(codec, gradients(2, 3), codec_states, MATRICES, rounds(3, world_size=2))[0]
    assert all(bool(found[begin : begin + rows * columns].any()) for begin, rows, columns in MATRICES)


@pytest.mark.parametrize(("name", "sums"), [("powersgd", 2), ("lowrank_quantised_16", 4)])
def test_all_matrices_of_a_bucket_are_summed_at_once(name, sums):
    calls = []
    reduced(LOW_RANK[name](), gradients(2, 1), [{}, {}], MATRICES, rounds(1, world_size=2), calls=calls)
    left, right, dense = (40 + 40 + 64) * 3, (60 + 60 + 33) * 3, 12
    scales = 3 * 3
    expected = {2: [4 * (left + dense), 4 * right], 4: [4 * (scales + dense), 2 * left, 4 * scales, 2 * right]}
    assert calls == expected[sums]


def test_a_bucket_of_nothing_but_what_is_not_worth_it_is_summed_once():
    for name in sorted(LOW_RANK):
        calls = []
        given = gradients(2, 1, size=12)
        [found, _] = reduced(LOW_RANK[name](), given, [{}, {}], [(0, 3, 4)], rounds(1, world_size=2), calls=calls)
        assert calls == [48]
        assert torch.equal(found, given[0] + given[1])


def test_buckets_and_seeds_begin_with_directions_of_their_own():
    def first(seed, index):
        given = gradients(1, 1, size=2400)
        return reduced(
            linear("powersgd"), given, [{}], [(0, 40, 60)], lambda _: Round(number=1, seed=seed), index=index
        )[0]

    torch.manual_seed(0)
    one = first(0, 0)
    torch.manual_seed(1)
    assert torch.equal(one, first(0, 0))
    assert not torch.equal(one, first(0, 1))
    assert not torch.equal(one, first(1, 0))


def test_the_sum_of_eight_bits_never_leaves_them_and_too_many_ranks_are_refused():
    world_size = 60
    given = [torch.full((2400,), 1.0 + rank / 7) for rank in range(world_size)]
    codec = linear("lowrank_quantised", matrix_rank=1, bits=8)
    states = [{} for _ in given]
    found = reduced(codec, given, states, [(0, 40, 60)], rounds(1, world_size=world_size))[0]
    total = found.double() + exact(state["residual"] for state in states)
    torch.testing.assert_close(total, exact(given), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="8 bits are too few for the sum of 250 ranks"):
        reduced(codec, given[:1], [{}], [(0, 40, 60)], rounds(1, world_size=250))


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_columns_become_orthonormal_and_those_that_depend_on_others_zeros(columns):
    generator = torch.Generator().manual_seed(2)
    factors = torch.randn(3, 30, columns, generator=generator) * 10.0 ** torch.arange(-20, -20 + columns)
    factors[1, :, -1] = 0.0
    if columns > 2:
        factors[2, :, 2] = factors[2, :, 0] * 1e20 + factors[2, :, 1]
    before = factors.double().numpy()
    orthonormalise(factors)
    for index in range(3):
        work = factors[index].double().numpy()
        expected = np.diag(np.ones(columns))
        if index == 1:
            expected[-1, -1] = 0.0
        if index == 2 and columns > 2:
            expected[2, 2] = 0.0
        np.testing.assert_allclose(work.T @ work, expected, atol=1e-6)
        if index == 0:
            q, r = np.linalg.qr(before[index])
            np.testing.assert_allclose(work, q * np.sign(np.diag(r)), atol=1e-5)


def test_a_plan_sends_factors_where_they_are_enough_times_smaller():
    plan = Plan.of(MATRICES, matrix_rank=3, min_ratio=2.0)
    assert [(group.rows, group.columns, group.begins) for group in plan.groups] == [
        (40, 60, (0, 2412)),
        (64, 33, (4812,)),
    ]
    assert plan.dense == ((2400, 2412),)
    assert plan.right_size == 3 * (60 + 60 + 33)
    assert Plan.of([(0, 40, 60)], matrix_rank=12, min_ratio=2.0).groups
    assert not Plan.of([(0, 40, 60)], matrix_rank=13, min_ratio=2.0).groups
