"""The kernels of a GPU give the bits of a CPU: those in Triton, and the reference itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulmen_exchange.kernels import reference
from fulmen_exchange.kernels.selection import Kernels, KernelSelector, Mode
from tests.support.exchange.kernel_inputs import SIZES, assert_same, numbers, results, rounded_multiples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


@pytest.fixture(params=[Mode.NATIVE, Mode.REFERENCE])
def on_gpu(request: pytest.FixtureRequest) -> Kernels:
    """Returns the kernels for a GPU."""
    return KernelSelector(mode=lambda: request.param).of("cuda")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("range_", [(-149, 120), (-8, 2), (-149, -120)], ids=["all", "usual", "subnormal"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_gpu_gives_the_bits_of_a_cpu(on_gpu: Kernels, size: int, range_: tuple[int, int], nesterov: bool) -> None:
    gradient, state = numbers(size, 1, lowest=range_[0], highest=range_[1]), numbers(size, 2)
    for bits, threshold in zip(range(2, 9), (0.0, -0.0, 1e-42, 1e-3, 1.0, 1e30, float("inf")), strict=True):
        how: dict[str, Any] = {"threshold": threshold, "nesterov": nesterov, "bits": bits}
        assert_same(results(on_gpu, gradient.cuda(), state.cuda(), **how), results(reference, gradient, state, **how))


def test_a_multiple_of_the_scale_is_itself(on_gpu: Kernels) -> None:
    assert not any(rounded_multiples(on_gpu, device="cuda"))


@pytest.mark.parametrize("share", [0.001, 0.01, 1.0])
def test_the_threshold_is_that_of_a_cpu(on_gpu: Kernels, share: float) -> None:
    sample = numbers(100_000, 1)
    assert on_gpu.threshold_of(sample.cuda(), share) == reference.threshold_of(sample, share)
