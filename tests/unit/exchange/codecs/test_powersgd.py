"""PowerSGD computes what the paper says, and what torch's own hook computes."""

import numpy as np
import pytest
import torch

from fulmen_exchange.codecs.codec import Round
from tests.support.exchange.codec_cases import gradient, linear, reduced

ROWS, COLUMNS = 48, 36


def of_two(number):
    """Returns the round of each of two ranks."""
    return lambda rank: Round(number=number, world_size=2, rank=rank)


def published(matrices, errors, right):
    """One round of algorithms 1 and 2 of arXiv:1905.13727, in float64, with sums in the place of means.

    Args:
        matrices: The gradients of the ranks.
        errors: What each has kept back.
        right: Q.

    Returns:
        The result, what each rank keeps back, and Q.
    """
    deltas = [matrix + error for matrix, error in zip(matrices, errors, strict=True)]
    p, _ = np.linalg.qr(sum(delta @ right for delta in deltas))
    own = [delta.T @ p for delta in deltas]
    right = sum(own)
    return p @ right.T, [delta - p @ each.T for delta, each in zip(deltas, own, strict=True)], right


@pytest.mark.parametrize("matrix_rank", [1, 3])
def test_two_ranks_compute_what_the_paper_says(matrix_rank):
    codec, states = linear("powersgd", matrix_rank=matrix_rank, min_ratio=1.0), [{}, {}]
    begin = torch.randn(COLUMNS * matrix_rank, generator=torch.Generator().manual_seed(2))
    for state in states:
        state.update(residual=torch.zeros(ROWS * COLUMNS), right=begin.clone())
    errors, right = [np.zeros((ROWS, COLUMNS))] * 2, begin.double().numpy().reshape(COLUMNS, matrix_rank)
    for number in range(1, 13):
        given = [gradient(ROWS * COLUMNS, 10 * number + rank) for rank in range(2)]
        found = reduced(codec, given, states, [(0, ROWS, COLUMNS)], of_two(number))
        matrices = [each.double().numpy().reshape(ROWS, COLUMNS) for each in given]
        expected, errors, right = published(matrices, errors, right)
        scale = float(np.abs(expected).max())
        assert torch.equal(found[0], found[1])
        np.testing.assert_allclose(found[0].numpy(), expected.ravel(), atol=1e-3 * scale)
        for state, error in zip(states, errors, strict=True):
            np.testing.assert_allclose(state["residual"].numpy(), error.ravel(), atol=1e-3 * scale)


def test_what_ranks_keep_back_does_not_grow_where_they_differ_for_good():
    # With the sum of all in the place of the rank's own part, what differs would be kept for ever, and added to.
    codec, states = linear("powersgd", matrix_rank=4, min_ratio=1.0), [{}, {}]
    generator = torch.Generator().manual_seed(4)
    part = torch.randn(ROWS, 1, generator=generator) @ torch.randn(1, COLUMNS, generator=generator)
    given = [(part + 0.5).flatten(), (-0.8 * part + 0.5).flatten()]
    for number in range(1, 41):
        reduced(codec, given, states, [(0, ROWS, COLUMNS)], of_two(number))
    assert all(float(state["residual"].norm()) < float(given[0].norm()) for state in states)
