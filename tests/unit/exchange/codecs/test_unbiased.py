"""Rounding at random is exact in the mean, and each draw is its own."""

import numpy as np
import pytest
import torch

from fulmen_exchange.codecs.codec import Round
from tests.support.exchange.codec_cases import decoded, gradient, segment

CODECS = {
    **{f"qsgd_{bits}": (lambda bits=bits: segment("qsgd", bits=bits)) for bits in (4, 5, 6, 7, 8)},
    "double_quantization_up": lambda: segment("double_quantization", bits_up=4),
}
ROUNDS = 3000


def errors(codec, values, rounds, rank=0):
    """Returns the error of each encoding: float64 [rounds, n]."""
    offsets = [0, values.numel()]
    found = [
        decoded(codec, codec.encode(values.clone(), {}, offsets, Round(number=number, rank=rank, seed=3)), offsets)
        for number in range(1, rounds + 1)
    ]
    return (torch.stack(found).double() - values.double()).numpy()


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_mean_of_many_encodings_is_the_input(name):
    codec, values = CODECS[name](), gradient(600)
    error = errors(codec, values, ROUNDS)
    levels = 2 ** (codec.bits - 1) - 1
    steps = np.repeat([float(values[:512].abs().max()), float(values[512:].abs().max())], 512)[:600] / levels
    # Of an element that lies a share p of a step above a level, the variance is p (1 - p) steps squared.
    share = np.mod(values.double().numpy() / steps, 1.0)
    sigma = steps * np.sqrt(share * (1 - share) / ROUNDS)
    # Of 600 elements none is 5 sigma off but by a chance of 3 in 10 000, and the draws are always the same; the
    # float32 in which levels are found is good for a hundred-thousandth of a step.
    assert np.all(np.abs(error.mean(axis=0)) <= 5 * sigma + 2e-5 * steps)
    assert np.all(np.abs(error) < 1.0001 * steps)
    # And it is rounding at random, not to the nearest: the mean of squares is what p (1 - p) says.
    ratio = (error**2).mean(axis=0).sum() / (steps**2 * share * (1 - share)).sum()
    assert abs(ratio - 1) < 0.05


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Round(number=1), Round(number=2)),
        (Round(number=1), Round(number=1, rank=1)),
        (Round(number=1), Round(number=1, seed=1)),
        (Round(number=1), Round(number=1, bucket=1)),
        (Round(number=1, bucket=1), Round(number=1, rank=1)),
    ],
)
def test_rounds_ranks_seeds_and_buckets_draw_apart(one, other):
    codec, values = segment("qsgd", bits=4), torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    offsets = [0, values.numel()]
    [first, second] = (
        decoded(codec, codec.encode(values.clone(), {}, offsets, each), offsets) - values for each in (one, other)
    )
    # Errors of an element are drawn each for itself, but have a common part where p is near 0 or 1: none in the mean.
    correlation = float((first * second).mean() / (first.std() * second.std()))
    assert abs(correlation) < 5 / np.sqrt(values.numel())
    again = decoded(codec, codec.encode(values.clone(), {}, offsets, one), offsets) - values
    assert torch.equal(again, first)


def test_neighbours_and_blocks_draw_apart():
    codec, values = segment("qsgd", bits=4), torch.full((100_000,), 0.37)
    values[::512] = 1.0
    error = errors(codec, values, 1)[0]
    for distance in (1, 2, 8, 512, 4096):
        one, other = error[:-distance], error[distance:]
        drawn = (np.abs(one) > 1e-6) & (np.abs(other) > 1e-6)
        assert drawn.sum() > 90_000
        assert abs(np.corrcoef(one[drawn], other[drawn])[0, 1]) < 5 / np.sqrt(drawn.sum())
