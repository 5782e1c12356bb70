"""A threshold from a sample keeps the ratio that was asked for, whatever the rows and the numbers of a gradient are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.codecs.codec import BLOCK, Round
from tests.support.exchange.codec_cases import decoded, segment
from tests.support.soak import SOAK

LEAST, MOST = 0.8, 1.3
"""Bytes over what was asked for, on both sides."""


def bytes_over_asked(codec, values, ratio, *, number=1, state=None):
    """Encodes a gradient; returns its bytes over those that the ratio allows."""
    state = codec.new_state(values) if state is None else state
    round_ = Round(number=number, ratio=ratio, seed=11)
    [payload] = codec.encode(values.clone(), state, [0, values.numel()], round_)
    return payload.nbytes / (4 * values.numel() / ratio)


def columns(size, width, seed):
    """Makes rows of a width whose first column has numbers a hundred times as large as those of the others."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    values[::width] *= 100.0
    return values


@pytest.mark.parametrize("name", ["topk", "dgc", "topk_quantised"])
@pytest.mark.parametrize("width", [5, 13, 64])
def test_the_width_of_rows_does_not_move_the_ratio(name, width):
    # A hundred thousand times the width: of so many elements every width-th one was the sample.
    values = columns(100_000 * width, width, 1)
    assert LEAST < bytes_over_asked(segment(name), values, 100.0) < MOST


DISTRIBUTIONS = {
    "normal": lambda size, draw: torch.randn(size, generator=draw),
    "heavy tails": lambda size, draw: torch.randn(size, generator=draw) / torch.rand(size, generator=draw).add_(1e-6),
    "sorted": lambda size, draw: torch.randn(size, generator=draw).sort().values,
    "few large": lambda size, draw: torch.randn(size, generator=draw) * (torch.rand(size, generator=draw) < 0.1),
    "growing": lambda size, draw: torch.randn(size, generator=draw) * torch.linspace(0, 10, size).exp_(),
}


@settings(max_examples=12 * SOAK, deadline=None)
@given(
    width=st.integers(1, 300),
    rows=st.integers(1000, 8000),
    kind=st.sampled_from(sorted(DISTRIBUTIONS)),
    ratio=st.sampled_from([20.0, 100.0, 300.0, 1000.0]),
    name=st.sampled_from(["topk", "dgc"]),
    seed=st.integers(0, 2**31),
)
def test_the_ratio_is_kept_for_any_width_and_distribution(width, rows, kind, ratio, name, seed):
    values = DISTRIBUTIONS[kind](width * rows, torch.Generator().manual_seed(seed))
    values.view(rows, width)[:, : max(1, width // 7)] *= 30.0
    assert LEAST < bytes_over_asked(segment(name), values, ratio) < MOST


@pytest.mark.parametrize("name", ["topk", "dgc", "topk_quantised"])
def test_equal_magnitudes_do_not_exceed_the_cap_and_all_of_them_are_sent_in_the_end(name):
    size = 300_000
    codec, values = segment(name), torch.ones(size)
    values[::2] = -1.0
    state, arrived = codec.new_state(values), torch.zeros(size, dtype=torch.bool)
    for number in range(1, 60):
        given_ = values if number == 1 else torch.zeros(size)
        round_ = Round(number=number, ratio=20.0, seed=3)
        payloads = codec.encode(given_.clone(), state, [0, size], round_)
        assert payloads[0].nbytes <= MOST * 4 * size / 20.0
        arrived |= decoded(codec, payloads, [0, size]) != 0
    assert bool(arrived.all())


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_the_cap_holds_back_keeps_its_momentum(nesterov):
    size = 40 * BLOCK
    codec = segment("dgc", nesterov=nesterov)
    values = torch.ones(size)
    state = codec.new_state(values)
    payloads = codec.encode(values.clone(), state, [0, size], Round(number=1, ratio=20.0))
    sent = decoded(codec, payloads, [0, size]) != 0
    assert 0 < int(sent.sum()) < size / 10
    assert torch.equal(state["velocity"], torch.where(sent, 0.0, 0.9 if nesterov else 1.0))
    assert torch.equal(state["accumulated"][~sent], torch.full((size - int(sent.sum()),), 1.9 if nesterov else 1.0))


def test_ranks_and_rounds_look_at_other_elements():
    codec, values = segment("topk"), columns(1_000_000, 3, 5)
    found = set()
    for number, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        round_ = Round(number=number, rank=rank, ratio=100.0, seed=3)
        [payload] = codec.encode(values.clone(), codec.new_state(values), [0, values.numel()], round_)
        found.add(payload.parts[1].numel())
    assert len(found) == 3, "the same round and rank give the same bytes"
