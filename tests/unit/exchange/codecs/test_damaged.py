"""A payload that is not what its codec makes is refused, and nothing of it is added."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import Payload, PayloadInvalid, Round, SegmentCodec
from tests.support.exchange.codec_cases import ALL, KEEPING, gradient, segment

SIZE = 9001
"""Three blocks of 4096, the last of 809; 18 blocks of 512."""
SPARSE = ("topk", "dgc", "topk_quantised_5")


def whole(codec: SegmentCodec, *, flush: bool = False) -> Payload:
    """Makes a payload that is right."""
    round_ = Round(number=1, ratio=20.0, flush=flush)
    return codec.encode(gradient(SIZE), codec.new_state(torch.zeros(SIZE)), [0, SIZE], round_)[0]


def assert_refused(codec: SegmentCodec, payload: Payload, size: int = SIZE) -> None:
    """Sees that a payload is refused, that nothing changes, and that the text names no number of it."""
    out = gradient(size, 9)
    before = out.clone()
    with pytest.raises(PayloadInvalid) as refused:
        codec.add(payload, out)
    assert torch.equal(out, before)
    assert "tensor" not in str(refused.value)


def with_part(payload: Payload, index: int, part: torch.Tensor) -> Payload:
    """Replaces a part."""
    return replace(payload, parts=(*payload.parts[:index], part, *payload.parts[index + 1 :]))


def changed(payload: Payload, index: int, at: int, value: float) -> Payload:
    """Replaces one number of a part."""
    part = payload.parts[index].clone()
    part[at] = value
    return with_part(payload, index, part)


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("flush", [False, True])
def test_other_codecs_versions_sizes_and_parts_are_refused(name, flush):
    codec = ALL[name]()
    payload = whole(codec, flush=flush)
    assert_refused(codec, replace(payload, codec="other"))
    assert_refused(codec, replace(payload, version=2))
    assert_refused(codec, replace(payload, size=SIZE - 1))
    assert_refused(codec, replace(payload, size=-1))
    assert_refused(codec, replace(payload, size=2**62))
    assert_refused(codec, payload, size=SIZE - 1)
    assert_refused(codec, payload, size=SIZE + 4096)
    assert_refused(codec, replace(payload, parts=()))
    assert_refused(codec, replace(payload, parts=payload.parts[:-1]))
    assert_refused(codec, replace(payload, parts=(*payload.parts, payload.parts[-1])))
    assert_refused(codec, replace(payload, parts=payload.parts[::-1] if len(payload.parts) > 1 else payload.parts * 2))
    for index, part in enumerate(payload.parts):
        assert_refused(codec, with_part(payload, index, part[:-1]))
        assert_refused(codec, with_part(payload, index, torch.cat([part, part[:1]])))
        assert_refused(codec, with_part(payload, index, part.double()))
        assert_refused(codec, with_part(payload, index, part[None]))
        assert_refused(codec, with_part(payload, index, part[:0]))


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(name, flush, value):
    codec = ALL[name]()
    payload = whole(codec, flush=flush)
    floats = [index for index, part in enumerate(payload.parts) if part.is_floating_point()]
    assert floats
    for index in floats:
        for at in (0, payload.parts[index].numel() // 2, -1):
            assert_refused(codec, changed(payload, index, at, value))


@pytest.mark.parametrize("name", ["qsgd_4", "qsgd_8", "double_quantization_up", "double_quantization_down_4"])
def test_scales_below_zero_and_other_numbers_of_bits_are_refused(name):
    codec = ALL[name]()
    assert_refused(codec, changed(whole(codec), 1, 3, -1.0))
    # It is finite, but what it scales would not be.
    assert_refused(codec, changed(whole(codec), 1, 3, 3e38))
    for bits in range(4, 9):
        if bits != codec.bits:
            other = whole(segment("qsgd", bits=bits))
            assert_refused(codec, replace(other, codec=codec.name))


@pytest.mark.parametrize("name", SPARSE)
def test_places_and_counts_that_do_not_fit_are_refused(name):
    codec = ALL[name]()
    payload = whole(codec)
    counts, indices = payload.parts[:2]
    first, last = int(counts[0]), int(counts[-1])
    assert min(first, last) > 2
    for at, value in ((0, -1), (0, -(2**15)), (first - 1, 4096), (-1, 809), (-1, 4095), (-1, 2**15 - 1)):
        assert_refused(codec, changed(payload, 1, at, value))
    # An element twice, or not in order, in the first block and in the last.
    assert_refused(codec, changed(payload, 1, 0, int(indices[1])))
    assert_refused(codec, changed(payload, 1, -1, int(indices[-2])))
    assert_refused(codec, with_part(payload, 1, torch.cat([indices[1:2], indices[:1], indices[2:]])))
    for block in range(3):
        assert_refused(codec, changed(payload, 0, block, int(counts[block]) + 1))
        assert_refused(codec, changed(payload, 0, block, int(counts[block]) - 1))
        assert_refused(codec, changed(payload, 0, block, -1))
        assert_refused(codec, changed(payload, 0, block, 4097))
    # Counts whose sum is right, of which one is negative, or which say that elements are of another block.
    assert_refused(
        codec, with_part(payload, 0, torch.tensor([-5, first + int(counts[1]) + 5, last], dtype=torch.int16))
    )
    assert_refused(codec, with_part(payload, 0, torch.tensor([0, 0, int(counts.sum())], dtype=torch.int16)))


def test_scales_without_a_block_and_blocks_without_a_scale_are_refused():
    codec = segment("topk_quantised")
    payload = whole(codec)
    scales = payload.parts[3]
    assert scales.numel() == 3
    assert_refused(codec, with_part(payload, 3, scales[:2]))
    assert_refused(codec, with_part(payload, 3, torch.cat([scales, scales[:1]])))
    assert_refused(codec, changed(payload, 3, 1, -1.0))
    assert_refused(codec, changed(payload, 3, 1, 0.0))
    assert_refused(codec, changed(payload, 3, 1, 3e38))


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_a_damaged_payload_is_not_credited_either(name):
    codec = KEEPING[name]()
    state = codec.new_state(torch.zeros(SIZE))
    payload = codec.encode(gradient(SIZE), state, [0, SIZE], Round(number=1, ratio=20.0))[0]
    before = {key: tensor.clone() for key, tensor in state.items()}
    for begin, wrong in ((0, replace(payload, version=2)), (1, payload)):
        with pytest.raises(PayloadInvalid):
            codec.credit(wrong, state, begin)
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_a_shard_that_refuses_a_payload_has_the_state_that_it_had():
    codec = segment("topk")
    shard, other = Shard(codec), Shard(codec)
    good, round_ = whole(codec), Round(number=1, world_size=2, rank=2, ratio=20.0)
    for each in (shard, other):
        each.reduce(0, [good, good], round_)
    bad = changed(good, 1, -1, 4095)
    for payloads in ([good, bad], [bad, good], [good, replace(good, size=SIZE - 1)]):
        with pytest.raises(PayloadInvalid):
            shard.reduce(0, payloads, round_)
    second = replace(round_, number=2)
    assert wire.encode(shard.reduce(0, [good, good], second)) == wire.encode(other.reduce(0, [good, good], second))


def test_a_shard_that_refuses_its_first_payload_takes_one_of_another_size_after_it():
    codec, values = segment("topk"), gradient(20)
    [small] = codec.encode(values.clone(), codec.new_state(values), [0, 20], Round(number=1))
    shard, round_ = Shard(codec), Round(number=1, rank=1)
    with pytest.raises(PayloadInvalid):
        shard.reduce(0, [replace(small, version=2)], round_)
    assert not shard.states
    assert shard.reduce(0, [whole(codec)], round_).size == SIZE


@given(data=st.data())
def test_any_payload_is_decoded_or_refused_and_nothing_else(data):
    name = data.draw(st.sampled_from(sorted(ALL)))
    codec = ALL[name]()
    payload = whole(codec, flush=data.draw(st.booleans()))
    index = data.draw(st.integers(0, len(payload.parts) - 1))
    raw = payload.parts[index].view(torch.uint8).clone()
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))
    wrong = with_part(payload, index, raw.view(payload.parts[index].dtype))
    out = torch.zeros(SIZE)
    try:
        codec.add(wrong, out)
    except PayloadInvalid:
        assert not out.any()
    else:
        assert bool(out.isfinite().all())
