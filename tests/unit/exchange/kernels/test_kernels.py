"""The compiled kernels give the bits of the reference, and the reference what the papers say."""

from __future__ import annotations

import shutil
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange import kernels
from fulmen_exchange.kernels import KernelsUnavailable, reference
from fulmen_exchange.kernels.loader import COMPILERS, compile_portable, load
from fulmen_exchange.kernels.native import NativeKernels
from fulmen_exchange.kernels.selection import Kernels
from tests.support.exchange.kernel_inputs import SIZES, assert_same, numbers, results, rounded_multiples
from tests.support.soak import SOAK

THRESHOLDS = (0.0, -0.0, 1e-42, 1e-3, 1.0, 1e30, float("inf"))
sizes, seeds = st.sampled_from(SIZES), st.integers(0, 2**32)
EXAMPLES = 20 * SOAK


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """Compiles the kernels."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    return NativeKernels(load(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(scope="module")
def portable(native: NativeKernels, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """Compiles the kernels for all machines of this kind."""
    library = compile_portable(tmp_path_factory.mktemp("kernels"))
    try:
        return NativeKernels(load(library.parent / "cache", path="", prebuilt=library.parent))
    except KernelsUnavailable:
        pytest.skip("this processor is older than those that they are compiled for")


@settings(max_examples=4 * EXAMPLES)
@given(
    size=sizes,
    seed=seeds,
    threshold=st.sampled_from(THRESHOLDS),
    nesterov=st.booleans(),
    bits=st.integers(2, 8),
    block=st.sampled_from([512, 4096, 100, 12, 1]),
)
@pytest.mark.parametrize("range_", [(-149, 120), (-8, 2), (-149, -120)], ids=["all", "usual", "subnormal"])
def test_compiled_kernels_give_the_bits_of_the_reference(
    native: Kernels, size: int, seed: int, range_: tuple[int, int], **how: Any
) -> None:
    gradient, state = numbers(size, seed, lowest=range_[0], highest=range_[1]), numbers(size, seed + 1)
    assert_same(results(native, gradient, state, **how), results(reference, gradient, state, **how))


@pytest.mark.parametrize("of", ["native", "reference"])
def test_what_lies_halfway_is_rounded_to_the_even_level(native: Kernels, of: str) -> None:
    kernels_ = native if of == "native" else reference
    halves = torch.arange(-7, 7.5, 0.5)
    whole, scales = kernels_.nearest(torch.cat([halves, torch.tensor([127.0])]), bits=8, block=512)
    assert scales.tolist() == [1.0]
    assert whole[:-1].tolist() == [round(half) for half in halves.tolist()]  # Python's, which is to even


@pytest.mark.parametrize(("bits", "block"), [(5, 512), (8, 100)])
def test_many_elements_have_the_bits_of_the_reference(native: Kernels, bits: int, block: int) -> None:
    how: dict[str, Any] = {"threshold": 1.0, "nesterov": False, "bits": bits, "block": block}
    inputs = numbers(70_001, 1), numbers(70_001, 2)
    assert_same(results(native, *inputs, **how), results(reference, *inputs, **how))


@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, share=st.sampled_from([1e-9, 0.001, 0.01, 0.5, 0.999, 1.0]))
def test_the_threshold_is_the_same(native: Kernels, size: int, seed: int, share: float) -> None:
    sample = numbers(size, seed)
    assert native.threshold_of(sample, share) == reference.threshold_of(sample, share)
    strided = numbers(3 * size, seed)[::3]
    assert native.threshold_of(strided, share) == reference.threshold_of(strided, share)


@pytest.mark.parametrize("size", SIZES)
def test_portable_kernels_give_the_bits_of_the_reference(portable: NativeKernels, size: int) -> None:
    inputs = numbers(size, 1), numbers(size, 2)
    for bits, threshold in zip(range(2, 9), THRESHOLDS, strict=True):
        how: dict[str, Any] = {"threshold": threshold, "nesterov": bool(bits % 2), "bits": bits}
        assert_same(results(portable, *inputs, **how), results(reference, *inputs, **how))


def test_of_equal_magnitudes_the_threshold_is_theirs(native: Kernels) -> None:
    sample = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5])
    assert native.threshold_of(sample, 0.4) == reference.threshold_of(sample, 0.4) == 1.0


def test_overflow_gives_the_bits_of_the_reference(native: Kernels) -> None:
    largest = torch.finfo(torch.float32).max
    gradient = torch.tensor([largest, -largest, largest, 1.0, float("inf")])
    state = torch.tensor([largest, -largest, 0.0, 2.0, 0.0])
    for threshold in (0.0, 1.0, float("inf")):
        residuals, sums = (state.clone(), state.clone()), (state.clone(), state.clone())
        taken = [
            of.feedback_select(gradient.clone(), residual, threshold)
            for of, residual in zip((native, reference), residuals, strict=True)
        ]
        for of, payload, sum_ in zip((native, reference), taken, sums, strict=True):
            of.add_sparse(*payload, sum_)
        assert_same((*taken[0], residuals[0], sums[0]), (*taken[1], residuals[1], sums[1]))


def test_what_is_not_zero_is_selected_and_stays_where_it_is(native: Kernels) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf"), -1e-45, 257.0])
    for of in (native, reference):
        given_ = values.clone()
        counts, indices, taken = of.nonzero_select(given_)
        assert counts.tolist() == [4]
        assert indices.tolist() == [2, 4, 5, 6]
        assert taken.tolist() == [1.0, float("inf"), 0.0, 256.0]
        assert given_.isnan().tolist() == values.isnan().tolist()
        assert torch.equal(given_.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize("bits", [2, 8])
def test_empty_inputs_give_empty_outputs(native: Kernels, bits: int) -> None:
    for of in (native, reference):
        found = results(of, torch.zeros(0), torch.zeros(0), threshold=0.0, nesterov=False, bits=bits)
        assert not any(part.numel() for part in found)


@pytest.mark.parametrize(
    ("counts", "indices"),
    [
        ([1, 1], [0, 904]),  # behind the end of the last block
        ([1, 1], [4096, 0]),  # in the next block
        ([1, 1], [0, -1]),
        ([1, 0], [0, 1]),  # fewer than there are
        ([2, 1], [0, 1]),  # more than there are
        ([-1, 3], [0, 1]),
        ([2, 0], [7, 7]),
        ([2, 0], [7, 6]),
    ],
)
def test_a_payload_whose_places_are_wrong_is_refused(native: Kernels, counts: list[int], indices: list[int]) -> None:
    for of in (native, reference):
        out = torch.zeros(5000)
        with pytest.raises(ValueError, match="out of range"):
            of.add_sparse(
                torch.tensor(counts, dtype=torch.int16),
                torch.tensor(indices, dtype=torch.int16),
                torch.ones(2, dtype=torch.bfloat16),
                out,
            )
        assert not out.any()


@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, share=st.sampled_from([0.001, 0.01, 0.5]))
def test_what_is_taken_and_what_is_kept_are_all_there_was(size: int, seed: int, share: float) -> None:
    gradient, state = numbers(size, seed, lowest=-60, highest=60), numbers(size, seed + 1, lowest=-60, highest=60)
    before = state.numpy() + gradient.numpy()
    threshold = kernels.threshold_of(torch.from_numpy(before), share)
    counts, indices, values = kernels.feedback_select(gradient, state, threshold)
    taken = np.zeros(size)
    blocks = np.repeat(np.arange(counts.numel()), counts.numpy())
    taken[blocks * 4096 + indices.numpy()] = values.double().numpy()
    np.testing.assert_array_equal(taken + state.double().numpy(), before.astype(np.float64))
    np.testing.assert_array_equal(taken != 0, (np.abs(before) >= threshold) & (before != 0))


def test_values_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    # bfloat16 has 8 bits: of 256 to 512 the even numbers.
    state = torch.tensor([257.0, 259.0, 257.5, -257.0])
    _, _, values = kernels.feedback_select(torch.zeros(4), state, 1.0)
    assert values.tolist() == [256.0, 260.0, 258.0, -256.0]
    assert state.tolist() == [1.0, -1.0, -0.5, -1.0]


def mixed(place: int, seed: int) -> float:
    """Draws the number of a place: Wellons' lowbias32 in integers of any size, written from its definition."""
    x = ((place % 2**32 ^ seed % 2**32) * 0x9E3779B1 + (seed >> 32)) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return ((x ^ x >> 16) >> 8) / 2**24


@pytest.mark.parametrize("begin", [0, 2**32 - 5, 2**40 + 4096])
def test_rounding_follows_the_random_number_of_a_place(begin: int) -> None:
    seed = 0x123456789ABCDEF0
    # The first element sets the scale to 1; the others lie between two whole numbers.
    values = torch.cat([torch.tensor([127.0]), torch.linspace(-3.0, 3.0, 500)])
    whole, scales = kernels.quantise(values, bits=8, block=512, begin=begin, seed=seed)
    drawn = np.array([mixed(begin + i, seed) for i in range(501)], dtype=np.float32)
    assert scales.tolist() == [1.0]
    np.testing.assert_array_equal(whole.numpy(), np.floor(values.numpy() + drawn).clip(-127, 127))


def test_a_multiple_of_the_scale_is_itself(native: Kernels) -> None:
    for of in (native, reference):
        assert not any(rounded_multiples(of))


@pytest.mark.parametrize("bits", range(2, 8))
def test_of_eight_neighbours_each_bit_is_one_byte(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    values = torch.tensor([float(levels), *(-levels if i % 3 else 0.0 for i in range(1, 10))])
    packed, _ = kernels.quantise(values, bits=bits, block=512, begin=0, seed=1)
    integers = values.numpy().astype(np.int64) & (2**bits - 1)
    padded = np.concatenate([integers, np.zeros(6, dtype=np.int64)]).reshape(2, 8)
    planes = [sum((int(lane) >> bit & 1) << i for i, lane in enumerate(row)) for row in padded for bit in range(bits)]
    assert packed.tolist() == planes


@settings(max_examples=EXAMPLES)
@given(size=st.integers(0, 700), begin=st.integers(0, 20), value=st.integers(0, 2**32 - 1), seed=seeds)
def test_the_checksum_is_that_of_zlib(
    native: NativeKernels, portable: NativeKernels, size: int, begin: int, value: int, seed: int
) -> None:
    data = memoryview(np.random.default_rng(seed).bytes(begin + size))[begin:]
    assert native.checksum(data, value) == portable.checksum(data, value) == zlib.crc32(data, value)


def test_tensors_of_another_kind_are_refused() -> None:
    good, matrix = torch.zeros(8), torch.zeros(8, 2)
    for bad in (good.double(), good.half(), matrix[:, 0], torch.zeros(9)):
        with pytest.raises(ValueError, match="gradients and states"):
            kernels.feedback_select(bad, good.clone(), 1.0)
        with pytest.raises(ValueError, match="gradients and states"):
            kernels.dgc_select(good, bad, good.clone(), 0.9, False, 1.0)
        with pytest.raises(ValueError, match="gradients and states"):
            kernels.correct(good, bad, 0.9, False, good.clone())
    whole, scales = kernels.quantise(good, bits=8, block=512, begin=0, seed=1)
    for wrong in ((whole[:7], scales), (whole, scales[:0]), (whole.short(), scales), (whole, scales.double())):
        with pytest.raises(ValueError, match=r"do not match|integers must be"):
            kernels.add_quantised(*wrong, torch.zeros(8), bits=8, block=512)
    counts, indices, values = kernels.feedback_select(torch.ones(8), torch.zeros(8), 1.0)
    with pytest.raises(ValueError, match="int16"):
        kernels.add_sparse(counts.int(), indices, values, torch.zeros(8))
