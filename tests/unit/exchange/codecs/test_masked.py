"""Masked sums: exact for the ranks, noise for the server, and no masks are left when a rank is lost."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import fulmen_exchange
from fulmen_exchange.codecs.codec import RESIDUAL, Bucket, Round
from fulmen_exchange.codecs.masked import ATTEMPTS, KEY_WORDS, MAX_RANKS, SHOWN, MaskedSettings
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.layout import Layout
from fulmen_exchange.registry import make_codec, settings_of
from tests.support.exchange.codec_cases import gradient, reduced
from tests.support.exchange.thread_ranks import Meeting

SIZE = 5000


def masked(**settings):
    return make_codec(settings_of("masked", **settings))


def rounds(world_size, number=1):
    return lambda rank: Round(number=number, world_size=world_size, rank=rank)


def given(world_size, scale=1.0):
    return [gradient(SIZE, 1 + rank) * scale for rank in range(world_size)]


def summed(codec, gradients, states, world_size, number=1):
    copies = [each.clone() for each in gradients]
    return reduced(codec, copies, states, [(0, SIZE, 1)], rounds(world_size, number))


def states_of(codec, world_size):
    flat = torch.zeros(SIZE)
    return [codec.new_state(Bucket(index=0, flat=flat, matrices=(), offsets=(0, SIZE))) for _ in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_sum_is_that_of_the_gradients_to_a_step_for_each_rank(world_size):
    codec, gradients = masked(limit=64.0), given(world_size)
    found = summed(codec, gradients, states_of(codec, world_size), world_size)
    assert all(torch.equal(one, found[0]) for one in found)
    exact = sum(each.double() for each in gradients)
    step = 64.0 * world_size / 2**30
    # The sum is rounded to float32 at last.
    assert float((found[0].double() - exact).abs().max()) <= world_size * step + 2**-23 * float(exact.abs().max())


def test_what_is_beyond_the_limit_comes_in_later_rounds():
    codec = masked(limit=0.5)
    gradients, states = [torch.full((SIZE,), 1.2), torch.full((SIZE,), -0.1)], states_of(codec, 2)
    total = torch.zeros(SIZE)
    for number, each in enumerate([gradients, *[[torch.zeros(SIZE)] * 2] * 3], start=1):
        total += summed(codec, each, states, 2, number)[0]
    torch.testing.assert_close(total, torch.full((SIZE,), 1.1), rtol=0, atol=1e-6)
    assert all(float(state[RESIDUAL].abs().max()) < 1e-6 for state in states)


def sent_by_ranks(codec, gradients, world_size, *, dropped=frozenset()):
    """Sums on ranks of one process, where tensors of `dropped`, pairs of rank and number, never arrive.

    Returns:
        What each rank sent, and what it got, or how it failed.
    """
    sent, meeting = [[] for _ in range(world_size)], Meeting(world_size)

    def run(rank):
        state = states_of(codec, 1)[0]

        def all_reduce(tensor):
            sent[rank].append(tensor.clone())
            is_lost = (rank, len(sent[rank])) in dropped
            tensor.copy_(sum(meeting.all(rank, torch.zeros_like(tensor) if is_lost else tensor.clone())))

        flat = gradients[rank].clone()
        bucket = Bucket(index=0, flat=flat, matrices=(), offsets=(0, SIZE))
        try:
            codec.reduce(bucket, state, all_reduce, rounds(world_size)(rank))
        except ExchangeFailed as error:
            return error
        return flat, state.get(RESIDUAL)

    with ThreadPoolExecutor(world_size) as threads:
        return sent, list(threads.map(run, range(world_size)))


def test_what_a_server_gets_is_uniform_and_tells_nothing_of_a_gradient():
    codec = masked()
    gradients = [torch.full((SIZE,), 3.0), torch.zeros(SIZE), torch.zeros(SIZE)]
    sent, _ = sent_by_ranks(codec, gradients, 3)
    seen = [tensors[1][:SIZE].numpy().view(np.uint32) for tensors in sent]
    for numbers in seen:
        # 64 bins of equal width; beyond 120 once in 10^5 draws of a uniform distribution.
        counts = np.bincount(numbers >> 26, minlength=64)
        assert float(((counts - SIZE / 64) ** 2 / (SIZE / 64)).sum()) < 140
        assert len(np.unique(numbers)) > SIZE - 10
    keys = [tensors[0].reshape(MAX_RANKS, KEY_WORDS) for tensors in sent]
    assert all(
        bool((rows[other] == 0).all()) for rank, rows in enumerate(keys) for other in range(MAX_RANKS) if other != rank
    )


def test_no_mask_is_used_twice():
    codec = masked()
    gradients = given(2)
    (first, _), (again, _) = (sent_by_ranks(codec, gradients, 2) for _ in range(2))
    assert float((first[0][1] == again[0][1]).float().mean()) < 0.01
    assert not torch.equal(first[0][0], again[0][0])


@pytest.mark.parametrize("when", [1, 2])
def test_a_rank_that_is_lost_before_or_after_its_keys_leaves_no_mask(when):
    codec, gradients = masked(limit=64.0), given(3)
    lost = {(2, number) for number in range(when, 10)}
    sent, found = sent_by_ranks(codec, gradients, 3, dropped=lost)
    exact = gradients[0] + gradients[1]
    for flat, _ in found:
        torch.testing.assert_close(flat, exact, rtol=1e-6, atol=1e-6)
    assert len(sent[0]) == (2 if when == 1 else 4), "once more if its masks were left"
    # What it could not send stays with the rank.
    torch.testing.assert_close(found[2][1], gradients[2])


def test_the_gradients_of_a_last_rank_are_not_sent():
    _, found = sent_by_ranks(masked(), given(2), 2, dropped={(1, number) for number in range(1, 10)})
    assert all(isinstance(each, ExchangeFailed) and "one rank is left" in str(each) for each in found)


def test_a_rank_alone_sends_nothing():
    sent, found = sent_by_ranks(masked(limit=64.0), given(1), 1)
    assert sent == [[]]
    torch.testing.assert_close(found[0][0], given(1)[0], rtol=1e-6, atol=1e-6)


def test_ranks_keep_their_numbers_when_others_have_left():
    codec, gradients = masked(limit=64.0), given(2)
    found = reduced(
        codec,
        gradients,
        states_of(codec, 2),
        [(0, SIZE, 1)],
        lambda rank: Round(number=1, world_size=2, rank=(3, 7)[rank]),
    )
    torch.testing.assert_close(found[0], gradients[0] + gradients[1], rtol=1e-6, atol=1e-6)


def test_a_key_with_which_everybody_would_know_the_masks_is_refused():
    def all_reduce(tensor):
        tensor[1] = 0
        tensor[1, 0] = 1  # a point of low order

    bucket = Bucket(index=0, flat=torch.ones(SIZE), matrices=(), offsets=(0, SIZE))
    with pytest.raises(ExchangeFailed, match="rank 1 sent no usable public key"):
        masked().reduce(bucket, {}, all_reduce, rounds(2)(0))


def test_ranks_that_are_lost_in_each_sum_end_the_exchange():
    dropped = {(rank, 2 * attempt) for attempt in range(1, ATTEMPTS + 1) for rank in [attempt % 3]}
    sent, found = sent_by_ranks(masked(), given(3), 3, dropped=dropped)
    assert all(isinstance(each, ExchangeFailed) and "ranks were lost" in str(each) for each in found)
    assert len(sent[0]) == 2 * ATTEMPTS


def test_vectors_and_small_parameters_are_masked_as_well():
    parameters = {"w": (4, 4), "b": (7,), "scale": ()}
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in parameters.items()]
    layout = Layout.of(named, settings_of("masked"), shards=1)
    assert layout.dense == ()
    assert [place.name for [*places] in layout.buckets for place in places] == list(parameters)


@pytest.mark.parametrize("members", [1, 4])
def test_the_noise_of_a_sum_has_the_deviation_that_was_asked_for(members):
    codec = masked(clip=2.0, noise=1.5, limit=100.0)
    assert codec.residual_name is None
    zeros = [torch.zeros(SIZE)] * members
    found = summed(codec, zeros, states_of(codec, members), members)[0]
    # Over the largest norm of a rank's gradients, which is clip / sqrt(ranks).
    expected = 1.5 * 2.0 / members**0.5
    assert float(found.std()) == pytest.approx(expected, rel=0.06)
    assert abs(float(found.mean())) < 5 * expected / SIZE**0.5


def test_all_that_would_show_a_gradient_is_refused_at_once():
    with pytest.raises(ValidationError) as caught:
        settings_of(
            "masked",
            policy={"kind": "auto"},
            link={"kind": "grpc", "targets": ["a:1"], "quorum": 0.5},
            dense=["bias"],
            noise=1.0,
            limit=0.01,
        )
    told = str(caught.value)
    assert all(word in told for word in ("policy:", "link.quorum:", "dense:", "noise:"))
    with pytest.raises(ValidationError, match="limit: must be at least 14"):
        MaskedSettings(clip=2.0, noise=1.0, limit=5.0)


@pytest.mark.parametrize("rounds_", [1, 100, 10_000])
@pytest.mark.parametrize("noise", [0.5, 1.0, 20.0])
def test_epsilon_is_below_the_bound_by_renyi_divergences_and_above_what_is_possible(noise, rounds_):
    delta = 1e-6
    found = fulmen_exchange.epsilon(noise, rounds_, delta=delta)
    # Mironov (arXiv:1702.07476), corollary 3 and proposition 3.
    orders = np.concatenate([1 + np.logspace(-3, 2, 2000)])
    renyi = float(np.min(orders * rounds_ / (2 * noise**2) + math.log(1 / delta) / (orders - 1)))
    assert 0 < found <= renyi
    # No test of one outcome does better: the likelihood ratio at the threshold where its probability is delta.
    mu = math.sqrt(rounds_) / noise
    draws = np.random.default_rng(0).normal(mu, 1, 200_000)
    losses = mu * draws - mu**2 / 2
    exceeded = float(np.maximum(0, 1 - np.exp(np.minimum(0, found - losses))).mean())
    assert exceeded <= delta + 5e-5


def test_epsilon_says_when_there_is_no_guarantee_or_nothing_was_sent():
    assert fulmen_exchange.epsilon(0.0, 1) == math.inf
    assert fulmen_exchange.epsilon(1.0, 0) == 0.0
    for arguments in ((1.0, 1, 0.0), (-1.0, 1, 0.1), (1.0, -1, 0.1)):
        with pytest.raises(ValueError, match="delta must be"):
            fulmen_exchange.epsilon(*arguments[:2], delta=arguments[2])


def test_the_keys_fill_one_row_each_and_the_shown_elements_end_the_tensor():
    sent, _ = sent_by_ranks(masked(), given(2), 2)
    assert sent[0][0].shape == (MAX_RANKS, KEY_WORDS)
    assert sent[0][1].numel() == SIZE + SHOWN
