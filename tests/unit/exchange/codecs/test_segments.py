"""What holds for every codec whose payloads a shard sums."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import LARGEST, Shard
from fulmen_exchange.codecs.codec import BLOCK, Round
from fulmen_exchange.codecs.sparse import share_of
from tests.support.exchange.codec_cases import (
    ALL,
    KEEPING,
    SIZES,
    decoded,
    gradient,
    kept,
    plainly_decoded,
    segment,
    through,
)

ROUND = Round(number=3, world_size=2, ratio=10.0, seed=7)
CUTS = (0, BLOCK, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK + 901)
"""Of four segments; one has no elements."""


def bits_of(name: str) -> int:
    """Returns the bits that a case has in its name."""
    return 6 if name.endswith("up") else int(name[-1]) if name[-1].isdigit() else 0


@pytest.mark.parametrize("name", sorted(ALL))
def test_payloads_come_back_bit_by_bit_and_another_decoder_reads_the_same(name):
    for size in SIZES:
        codec = ALL[name]()
        [payload] = codec.encode(gradient(size), codec.new_state(torch.zeros(size)), [0, size], ROUND)
        back = through(payload)
        assert (back.codec, back.version, back.size) == (payload.codec, payload.version, size)
        assert [part.dtype for part in back.parts] == [part.dtype for part in payload.parts]
        for part, other in zip(payload.parts, back.parts, strict=True):
            assert part.is_contiguous()
            assert part.ndim == 1
            assert torch.equal(part, other)
        expected = plainly_decoded(bytes(wire.encode(payload)), bits_of(name))
        assert np.array_equal(decoded(codec, [payload], [0, size]).numpy(), expected.astype(np.float32)), size


@pytest.mark.parametrize("name", sorted(KEEPING))
@settings(max_examples=15)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 99), ratio=st.sampled_from([1.0, 4.0, 30.0, 1000.0]))
def test_what_was_decoded_and_what_is_kept_back_is_what_was_given(name, size, seed, ratio):
    codec, total, sum_ = KEEPING[name](), np.zeros(size), np.zeros(size)
    state = codec.new_state(torch.zeros(size))
    for number in range(1, 7):
        coming = gradient(size, seed + number)
        total += coming.double().numpy()
        payloads = codec.encode(coming, state, [0, size], Round(number=number, ratio=ratio, flush=number == 5))
        sum_ += decoded(codec, payloads, [0, size]).double().numpy()
    np.testing.assert_allclose(sum_ + kept(state, size).double().numpy(), total, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_no_element_is_worse_off_than_if_nothing_had_been_sent(name):
    # What error feedback needs: the error is less than what was to be sent.
    values = gradient(9001)
    values[17] = 1e6
    codec = KEEPING[name]()
    state = codec.new_state(values)
    codec.encode(values.clone(), state, [0, 9001], ROUND)
    assert bool((kept(state, 9001).abs() <= values.abs() * 1.01).all())
    assert float(kept(state, 9001).norm()) < 0.6 * float(values.norm())


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_when_everything_is_to_be_sent_hardly_anything_is_kept_back(name):
    codec, values = KEEPING[name](), gradient(9001)
    state = codec.new_state(values)
    codec.encode(values.clone(), state, [0, 9001], ROUND)
    codec.encode(values.clone(), state, [0, 9001], Round(number=4, flush=True))
    assert bool((kept(state, 9001).abs() <= values.abs() * 2**-7).all())


@pytest.mark.parametrize("name", sorted(ALL))
def test_where_a_bucket_is_cut_changes_nothing(name):
    size, codec = CUTS[-1], ALL[name]()
    whole, cut = codec.new_state(torch.zeros(size)), codec.new_state(torch.zeros(size))
    for number in range(1, 4):
        round_ = Round(number=number, ratio=8.0, seed=5, flush=number == 3)
        one = codec.encode(gradient(size, number), whole, [0, size], round_)
        several = codec.encode(gradient(size, number), cut, list(CUTS), round_)
        assert [payload.size for payload in several] == [right - left for left, right in pairwise(CUTS)]
        assert torch.equal(decoded(codec, one, [0, size]), decoded(codec, several, CUTS))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


@pytest.mark.parametrize("name", sorted(ALL))
def test_zeros_stay_zeros_and_sparse_codecs_send_none(name):
    codec = ALL[name]()
    state = codec.new_state(torch.zeros(5000))
    payloads = codec.encode(torch.zeros(5000), state, [0, 5000], ROUND)
    assert not decoded(codec, payloads, [0, 5000]).any()
    assert not any(tensor.any() for tensor in state.values())
    if "topk" in name or "dgc" in name:
        assert payloads[0].nbytes == 2 * 2


@pytest.mark.parametrize("name", sorted(ALL))
def test_one_huge_element_drowns_no_other_for_good(name):
    codec, values = ALL[name](), torch.full((6000,), 1e-3)
    values[4321] = 1e30
    state = codec.new_state(values)
    first = decoded(codec, codec.encode(values.clone(), state, [0, 6000], Round(number=1, ratio=50)), [0, 6000])
    assert bool(first.isfinite().all())
    expected = 1.9e30 if name == "dgc_nesterov" else 1e30
    assert abs(float(first[4321]) / expected - 1) < 2**-8
    if name in KEEPING:
        flushed = decoded(
            codec, codec.encode(torch.zeros(6000), state, [0, 6000], Round(number=2, flush=True)), [0, 6000]
        )
        others = (first + flushed)[torch.arange(6000) != 4321]
        torch.testing.assert_close(others, torch.full((5999,), 1e-3), rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", sorted(ALL))
@settings(max_examples=15)
@given(data=st.data())
def test_magnitudes_of_any_kind_stay_numbers_and_nothing_of_them_is_lost(name, data):
    exponents = st.integers(-46, 37)
    elements = st.tuples(st.floats(-9.9, 9.9), exponents).map(lambda pair: pair[0] * 10.0 ** pair[1])
    values = torch.tensor(data.draw(st.lists(elements, min_size=1, max_size=40)), dtype=torch.float32)
    codec = ALL[name]()
    state, offsets = codec.new_state(values), [0, values.numel()]
    round_ = Round(number=1, ratio=data.draw(st.sampled_from([1.0, 5.0, 50.0])), flush=data.draw(st.booleans()))
    found = decoded(codec, codec.encode(values.clone(), state, offsets, round_), offsets)
    assert bool(found.isfinite().all())
    if name in KEEPING:
        total = found.double() + kept(state, values.numel()).double()
        torch.testing.assert_close(total, values.double(), rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_a_payload_that_nobody_summed_is_put_back_as_if_it_had_not_been_made(name):
    size, codec = CUTS[-1], KEEPING[name]()
    state = codec.new_state(torch.zeros(size))
    codec.encode(gradient(size, 1), state, list(CUTS), ROUND)
    before = kept(state, size) + gradient(size, 2)
    payloads = codec.encode(gradient(size, 2), state, list(CUTS), ROUND)
    after = kept(state, size)
    codec.credit(through(payloads[1]), state, CUTS[1])
    left, right = CUTS[1:3]
    if "quant" in name:
        torch.testing.assert_close(kept(state, size)[left:right], before[left:right], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(kept(state, size)[left:right], before[left:right])
    assert torch.equal(kept(state, size)[:left], after[:left])
    assert torch.equal(kept(state, size)[right:], after[right:])


@pytest.mark.parametrize("name", ["qsgd_8", "double_quantization_up"])
def test_a_codec_that_keeps_nothing_loses_a_payload_that_nobody_summed(name):
    codec = ALL[name]()
    state = codec.new_state(torch.zeros(100))
    [payload] = codec.encode(gradient(100), state, [0, 100], ROUND)
    codec.credit(payload, state, 0)
    assert state == {}


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_shard_gives_the_same_bits_again_and_the_order_of_ranks_matters_to_rounding_alone(name):
    size, codec = 9001, ALL[name]()
    payloads = [
        codec.encode(gradient(size, rank), codec.new_state(torch.zeros(size)), [0, size], Round(number=1, rank=rank))[0]
        for rank in range(5)
    ]
    round_ = Round(number=1, world_size=5, rank=5, flush=True)
    replies = [wire.encode(Shard(ALL[name]()).reduce(0, payloads, round_)) for _ in range(2)]
    assert replies[0] == replies[1]
    sums = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        sums.append(torch.zeros(size))
        for rank in order:
            codec.add(payloads[rank], sums[-1])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)
    expected = sum(plainly_decoded(bytes(wire.encode(payload)), bits_of(name)) for payload in payloads)
    np.testing.assert_allclose(sums[0].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["topk", "topk_quantised"])
@pytest.mark.parametrize("ratio", [4.0, 20.0, 100.0, 1000.0])
def test_the_ratio_is_that_of_bytes_with_all_that_goes_with_them(name, ratio):
    size = 100 * BLOCK
    codec = segment(name, exact=True)
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    [payload] = codec.encode(values, codec.new_state(values), [0, size], Round(number=1, ratio=ratio))
    assert 0.93 * ratio < 4 * size / payload.nbytes < 1.6 * ratio


def test_a_share_is_never_more_than_all_nor_nothing():
    assert share_of(1.0) < 1.0 < 1.01 * share_of(1.0)
    assert share_of(0.1) == 1.0
    assert 0 < share_of(1e9) < 1e-4


@pytest.mark.parametrize("name", sorted(ALL))
def test_an_element_whose_sum_overflows_is_left_out_once_and_summed_in_later_rounds(name):
    codec, size, place = ALL[name](), BLOCK, 7
    shard, reply = Shard(codec), ALL[name]().reply()
    huge = torch.zeros(size)
    huge[place] = 1.5 * LARGEST
    states = [codec.new_state(huge) for _ in range(2)]

    def summed(number, values):
        round_ = Round(number=number, world_size=2, ratio=4.0, seed=7, flush=True)
        payloads = [codec.encode(values.clone(), state, [0, size], round_)[0] for state in states]
        out = torch.zeros(size)
        reply.add(shard.reduce(0, payloads, round_), out)
        return out

    assert bool(summed(1, huge).isfinite().all())
    assert shard.overflowed == 1
    ones = torch.zeros(size)
    ones[place] = 1.0
    for state in states:
        for tensor in state.values():
            tensor.zero_()
    later = sum(float(summed(number, ones)[place]) for number in range(2, 12))
    assert later > 19.0, "that of two ranks in ten rounds, and more with momentum"
    assert shard.overflowed == 1
