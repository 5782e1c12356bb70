"""Deep gradient compression is what Lin et al. have written down."""

import numpy as np
import pytest
import torch

from fulmen_exchange.codecs.codec import Round
from tests.support.exchange.codec_cases import decoded, gradient, segment
from tests.support.exchange.dgc import published

SIZE = 9001


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_published_algorithm(nesterov, momentum):
    codec = segment("dgc", momentum=momentum, nesterov=nesterov)
    state = codec.new_state(torch.zeros(SIZE))
    u, v = np.zeros(SIZE), np.zeros(SIZE)
    ratio, sent_at_all = 20.0, 0
    for number in range(1, 30):
        coming = gradient(SIZE, number)
        payloads = codec.encode(coming.clone(), state, [0, SIZE], Round(number=number, ratio=ratio))
        found = decoded(codec, payloads, [0, SIZE]).double().numpy()

        def largest(of):
            # As many as the ratio says, the largest first: the sample of so small a bucket is all of it.
            keep = round((4 / ratio - 2 / 4096) / 4 * SIZE)
            return np.abs(of) >= np.sort(np.abs(of))[-keep] * (1 - 1e-7)

        u, v, expected = published(u, v, coming.double().numpy(), momentum, nesterov=nesterov, sent=largest)
        assert np.array_equal(found != 0, expected != 0), number
        # A value within float32's rounding of the middle between two bfloat16 may go either way.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=0)
        np.testing.assert_allclose(found + state["accumulated"].double().numpy(), expected + v, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state["velocity"].double().numpy(), u, rtol=1e-4, atol=1e-4)
        v = state["accumulated"].double().numpy()
        sent_at_all += int((expected != 0).sum())
    assert sent_at_all > 29 * 400


def sgd(gradients, m, *, nesterov):
    """What SGD with momentum moves weights by, float64, as PyTorch has it: b = m b + g, and g + m b with Nesterov's."""
    buffer, moves = np.zeros(SIZE), []
    for g in gradients:
        buffer = m * buffer + g
        moves.append(g + m * buffer if nesterov else buffer)
    return moves


@pytest.mark.parametrize("nesterov", [False, True])
def test_rounds_that_send_everything_are_steps_of_sgd_with_momentum(nesterov):
    codec = segment("dgc", momentum=0.9, nesterov=nesterov)
    left_out, flushed = (codec.new_state(torch.zeros(SIZE)) for _ in range(2))
    gradients = [gradient(SIZE, number) for number in range(1, 12)]
    sent, moved = np.zeros(SIZE), np.zeros(SIZE)
    for number, (g, wanted) in enumerate(
        zip(gradients, sgd([g.double().numpy() for g in gradients], 0.9, nesterov=nesterov), strict=True), start=1
    ):
        whole = g.clone()
        codec.correct(left_out, whole, 0, whole)
        codec.release(whole, left_out)
        np.testing.assert_allclose(whole.double().numpy(), wanted, rtol=1e-4, atol=1e-4)
        payloads = codec.encode(g.clone(), flushed, [0, SIZE], Round(number=number, flush=True))
        sent += decoded(codec, payloads, [0, SIZE]).double().numpy()
        moved += wanted
        # What rounding to bfloat16 leaves comes in the next round.
        rounded = flushed["accumulated"].double().numpy()
        np.testing.assert_allclose(sent + rounded, moved, rtol=1e-4, atol=1e-3)
        assert np.abs(rounded).max() < 2**-8 * np.abs(wanted).max() * 1.1


@pytest.mark.parametrize("way", ["flushed", "left out"])
def test_a_round_that_sends_everything_sends_what_was_accumulated_and_goes_on_with_its_momentum(way):
    codec = segment("dgc")
    state = codec.new_state(torch.zeros(SIZE))
    for number in range(1, 4):
        codec.encode(gradient(SIZE, number), state, [0, SIZE], Round(number=number, ratio=100.0))
    momentum = 0.9 * state["velocity"] + gradient(SIZE, 4)
    before = state["accumulated"] + momentum
    found = gradient(SIZE, 4)
    if way == "flushed":
        payloads = codec.encode(found, state, [0, SIZE], Round(number=4, flush=True))
        found = decoded(codec, payloads, [0, SIZE])
    else:
        codec.correct(state, found, 0, found)
        codec.release(found, state)
    torch.testing.assert_close(found, before, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state["velocity"], momentum)
    assert bool((state["accumulated"].abs() <= before.abs() * 2**-8).all())


def test_a_payload_that_nobody_summed_is_accumulated_again_and_its_momentum_stays_stopped():
    codec = segment("dgc")
    state = codec.new_state(torch.zeros(SIZE))
    values = gradient(SIZE)
    [payload] = codec.encode(values.clone(), state, [0, SIZE], Round(number=1, ratio=10.0))
    stopped = state["velocity"].clone()
    codec.credit(payload, state, 0)
    assert torch.equal(state["accumulated"], values)
    assert torch.equal(state["velocity"], stopped)
    assert bool((stopped == 0)[values.abs() >= values.abs().quantile(0.99)].all())
