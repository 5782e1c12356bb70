"""The kernels of a GPU give the bits of a CPU: those in Triton, and the reference itself."""

from __future__ import annotations

import pytest
import torch

from fulmen_exchange.kernels import reference
from fulmen_exchange.kernels.selection import Kernels, KernelSelector, Mode
from tests.support.exchange.kernel_inputs import (
    SIZES,
    assert_same,
    corrected,
    numbers,
    quantised,
    rounded,
    rounded_multiples,
    selected,
    stepped,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


@pytest.fixture(params=[Mode.NATIVE, Mode.REFERENCE])
def on_gpu(request: pytest.FixtureRequest) -> Kernels:
    """Returns the kernels for a GPU."""
    return KernelSelector(mode=lambda: request.param).of("cuda")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 1e-42, 1e-3, 1.0, float("inf")])
def test_selecting_with_feedback_gives_the_bits_of_a_cpu(on_gpu: Kernels, size: int, threshold: float) -> None:
    gradient, state = numbers(size, 1), numbers(size, 2)
    found = selected(on_gpu, gradient.cuda(), state.cuda(), threshold)
    assert_same(found, selected(reference, gradient, state, threshold))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 1.0, float("inf")])
@pytest.mark.parametrize("nesterov", [False, True])
def test_selecting_with_momentum_gives_the_bits_of_a_cpu(
    on_gpu: Kernels, size: int, threshold: float, nesterov: bool
) -> None:
    gradient, state = numbers(size, 1), numbers(size, 2)
    found = corrected(on_gpu, gradient.cuda(), state.cuda(), threshold, nesterov=nesterov)
    assert_same(found, corrected(reference, gradient, state, threshold, nesterov=nesterov))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_with_momentum_have_the_bits_of_a_cpu(on_gpu: Kernels, size: int, nesterov: bool) -> None:
    gradient, state = numbers(size, 1), numbers(size, 2)
    found = stepped(on_gpu, gradient.cuda(), state.cuda(), nesterov=nesterov)
    assert_same(found, stepped(reference, gradient, state, nesterov=nesterov))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("range_", [(-149, 120), (-8, 2), (-149, -120)], ids=["all", "usual", "subnormal"])
def test_quantising_gives_the_bits_of_a_cpu(on_gpu: Kernels, size: int, bits: int, range_: tuple[int, int]) -> None:
    values, state = numbers(size, 1, lowest=range_[0], highest=range_[1]), numbers(size, 2)
    found = quantised(on_gpu, values.cuda(), state.cuda(), bits=bits)
    assert_same(found, quantised(reference, values, state, bits=bits))
    assert_same(rounded(on_gpu, values.cuda(), bits=bits), rounded(reference, values, bits=bits))


def test_a_multiple_of_the_scale_is_itself(on_gpu: Kernels) -> None:
    assert not any(rounded_multiples(on_gpu, device="cuda"))


@pytest.mark.parametrize("share", [0.001, 0.01, 1.0])
def test_the_threshold_is_that_of_a_cpu(on_gpu: Kernels, share: float) -> None:
    sample = numbers(100_000, 1)
    assert on_gpu.threshold_of(sample.cuda(), share) == reference.threshold_of(sample, share)
