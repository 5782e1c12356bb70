"""What comes back of a sparse codec is all that any rank has sent, unless a setting says less."""

import pytest
import torch

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import BLOCK, PayloadInvalid, Round
from fulmen_exchange.codecs.union import Union
from tests.support.exchange.codec_cases import decoded, gradient, plainly_decoded, segment, through

SPARSE = ("dgc", "topk", "topk_quantised")
SIZE = 20 * BLOCK + 77


def exchanged(codec, *, ranks, ratio, rounds=1):
    """Sums rounds of several ranks; returns of each round what was sent, decoded, and the reply."""
    states = [codec.new_state(torch.zeros(SIZE)) for _ in range(ranks)]
    shard, found = Shard(codec), []
    for number in range(1, rounds + 1):
        round_ = Round(number=number, world_size=ranks, ratio=ratio)
        payloads = [
            codec.encode(gradient(SIZE, 100 * number + rank), state, [0, SIZE], round_)[0]
            for rank, state in enumerate(states)
        ]
        sent = torch.stack([decoded(codec, [payload], [0, SIZE]) for payload in payloads])
        found.append((sent, payloads, through(shard.reduce(0, payloads, round_))))
    return shard, found


@pytest.mark.parametrize("name", SPARSE)
def test_every_element_that_a_rank_has_sent_comes_back_in_the_same_round(name):
    codec = segment(name)
    shard, found = exchanged(codec, ranks=4, ratio=50.0, rounds=3)
    for sent, payloads, reply in found:
        back = decoded(codec.reply(), [reply], [0, SIZE])
        torch.testing.assert_close(back, sent.sum(0), rtol=2**-8, atol=0)
        assert reply.nbytes <= 2 * sum(payload.nbytes for payload in payloads)
    assert not any(shard.states.values()), "a shard keeps nothing"


@pytest.mark.parametrize("name", SPARSE)
def test_a_union_that_is_nearly_everything_is_sent_without_places(name):
    codec = segment(name)
    _, [(sent, _, reply)] = exchanged(codec, ranks=16, ratio=4.0)
    assert reply.nbytes == 2 * SIZE
    torch.testing.assert_close(decoded(codec.reply(), [reply], [0, SIZE]), sent.sum(0), rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("ratio_down", [50.0, 200.0])
def test_a_ratio_of_the_way_down_cuts_the_sum_again_and_keeps_the_rest_at_the_shard(name, ratio_down):
    codec = segment(name, ratio=50.0, ratio_down=ratio_down, **({} if name == "dgc" else {"exact": True}))
    shard, found = exchanged(codec, ranks=4, ratio=50.0, rounds=3)
    total = torch.zeros(SIZE)
    for sent, _, reply in found:
        assert 0.7 * ratio_down < 4 * SIZE / reply.nbytes < 1.7 * ratio_down
        total += sent.sum(0) - decoded(codec.reply(), [reply], [0, SIZE])
    torch.testing.assert_close(shard.states[0]["residual"], total, rtol=1e-4, atol=1e-4)


def test_a_ratio_of_the_way_down_follows_the_warm_up():
    codec = segment("topk", ratio=100.0, ratio_down=100.0, exact=True)
    _, [(_, payloads, reply)] = exchanged(codec, ranks=2, ratio=4.0)
    assert abs(reply.nbytes / payloads[0].nbytes - 1) < 0.01


@pytest.mark.parametrize("filled", [0, 1, 500, SIZE])
def test_an_independent_decoder_reads_a_union(filled):
    values = torch.zeros(SIZE)
    values[torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))[:filled]] = 1.5
    [payload] = Union().encode(values.clone(), {}, [0, SIZE], Round(number=1))
    assert torch.equal(torch.tensor(plainly_decoded(bytes(wire.encode(payload)))).float(), values)
    assert len(payload.parts) == (1 if filled == SIZE else 3)


def test_a_dense_union_of_another_size_or_with_infinities_is_refused():
    [payload] = Union().encode(torch.ones(100), {}, [0, 100], Round(number=1))
    for bad in (payload.parts[0][:99], payload.parts[0] * float("inf"), payload.parts[0].float()):
        out = torch.zeros(100)
        with pytest.raises(PayloadInvalid):
            Union().add(type(payload)(codec="union", version=1, size=100, parts=(bad,)), out)
        assert not out.any()
