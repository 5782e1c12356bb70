"""The outer loop against the papers' equations in float64, over ranks that are simulated side by side."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import BLOCK, RESIDUAL, Round
from fulmen_exchange.codecs.sparse import Feedback
from fulmen_exchange.outer import OuterState, OuterStateInvalid, OuterSteps, decay_residuals
from fulmen_exchange.settings import OuterLoopSettings
from tests.support.exchange.codec_cases import segment

RANKS, SIZE = 3, BLOCK + 100


def settings_of(**given: object) -> OuterLoopSettings:
    return OuterLoopSettings(kind="outer", **given)


class Ranks:
    """Ranks whose losses are |w - target|^2 / 2, each with a target of its own, and whose optimiser is plain SGD."""

    def __init__(self, outer: OuterLoopSettings, *, seed: int = 0, ratio: float | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.targets = rng.normal(size=(RANKS, SIZE))
        self.start = rng.normal(size=SIZE)
        self.outer, self.ratio, self.number = outer, ratio, 0
        self.weights = [{"w": torch.tensor(self.start, dtype=torch.float32)} for _ in range(RANKS)]
        self.loops = [OuterSteps(outer) for _ in range(RANKS)]
        for loop, weights in zip(self.loops, self.weights, strict=True):
            loop.begin(weights)
        self.codec = Feedback(name="topk", exact=True)
        self.states = [self.codec.new_state(torch.zeros(SIZE)) for _ in range(RANKS)]
        self.offsets = [0, BLOCK, SIZE]
        self.shards = [Shard(self.codec) for _ in self.offsets[1:]]
        self.sent: list[torch.Tensor] = []

    def run(self, rounds: int) -> None:
        """Takes outer steps, with H inner ones before each."""
        for _ in range(rounds):
            for rank, (loop, weights) in enumerate(zip(self.loops, self.weights, strict=True)):
                target = torch.tensor(self.targets[rank], dtype=torch.float32)
                while not loop.due():
                    weights["w"] -= 0.1 * (weights["w"] - target)
                    loop.on_step()
            given = [loop.pseudo_gradients()["w"] for loop in self.loops]
            average = sum(given) / RANKS if self.ratio is None else self._exchange(given)
            for loop in self.loops:
                loop.apply({"w": average})

    def _exchange(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Averages through the codec and its shards, as ranks of a link do."""
        self.number += 1
        round_ = Round(number=self.number, world_size=RANKS, ratio=self.ratio)
        decay_residuals(self.codec, self.states, self.outer)
        payloads = [
            self.codec.encode(one.clone(), state, self.offsets, round_)
            for one, state in zip(given, self.states, strict=True)
        ]
        self.sent = [self._decoded(each) for each in payloads]
        replies = [shard.reduce(0, [each[i] for each in payloads], round_) for i, shard in enumerate(self.shards)]
        return self._decoded(replies) / RANKS

    def _decoded(self, payloads) -> torch.Tensor:
        out = torch.zeros(SIZE)
        for payload, (left, right) in zip(payloads, pairwise(self.offsets), strict=True):
            self.codec.add(payload, out[left:right])
        return out


def reference(ranks: Ranks, *, rounds: int, inner: int, rate: float, momentum: float) -> np.ndarray:
    """DiLoCo's algorithm 1 in float64, with plain SGD inside and Nesterov's momentum as Sutskever et al. (2013) have it
    after the change of variables: v = m v + d, theta = theta - rate (d + m v)."""
    anchor, velocity = ranks.start.copy(), np.zeros(SIZE)
    for _ in range(rounds):
        # H steps of SGD on a quadratic, in closed form.
        local = ranks.targets + (anchor - ranks.targets) * 0.9**inner
        delta = (anchor - local).mean(axis=0)
        velocity = momentum * velocity + delta
        anchor = anchor - rate * (delta + momentum * velocity)
    return anchor


@settings(deadline=None, max_examples=10)
@given(inner=st.integers(1, 6), rate=st.floats(0.1, 1.0), momentum=st.sampled_from([0.0, 0.5, 0.9]))
def test_outer_steps_are_those_of_the_paper(inner, rate, momentum):
    ranks = Ranks(settings_of(steps=inner, learning_rate=rate, momentum=momentum))
    ranks.run(5)
    expected = reference(ranks, rounds=5, inner=inner, rate=rate, momentum=momentum)
    np.testing.assert_allclose(ranks.weights[0]["w"].numpy(), expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=6)
@given(decay=st.sampled_from([0.5, 0.95, 1.0]), seed=st.integers(0, 100))
def test_what_is_kept_back_is_beta_of_what_was_and_what_came_less_what_was_sent(decay, seed):
    ranks = Ranks(settings_of(steps=2, decay=decay), ratio=20.0, seed=seed)
    expected = np.zeros((RANKS, SIZE))
    for _ in range(4):
        anchor = ranks.weights[0]["w"].double().numpy().copy()
        local = ranks.targets + (anchor - ranks.targets) * 0.9**2
        ranks.run(1)
        expected = decay * expected + (anchor - local) - np.stack([one.double().numpy() for one in ranks.sent])
        found = np.stack([state[RESIDUAL].double().numpy() for state in ranks.states])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.01


def test_an_exchange_is_due_after_so_many_steps_and_counts_from_the_last_one():
    loop = OuterSteps(settings_of(steps=2))
    loop.begin({"w": torch.zeros(3)})
    due = []
    for _ in range(5):
        loop.on_step()
        due.append(loop.due())
        if loop.due():
            loop.apply({"w": torch.zeros(3)})
    assert due == [False, True, False, True, False]


def test_weights_of_16_bits_are_moved_from_an_anchor_of_32():
    loop, weights = OuterSteps(settings_of(steps=1)), {"w": torch.ones(2, dtype=torch.bfloat16)}
    loop.begin(weights)
    for _ in range(8):
        # A step of 2^-10 alone is lost in bfloat16, whose next number below 1 is 2^-8 away.
        loop.apply({"w": torch.full((2,), 2.0**-10)})
    assert loop.state().anchor["w"].tolist() == [1 - 2.0**-7] * 2
    assert weights["w"].tolist() == [1 - 2.0**-7] * 2


def test_a_state_of_other_parameters_or_settings_is_refused_and_changes_nothing():
    loop = OuterSteps(settings_of(momentum=0.9))
    loop.begin({"a": torch.ones(2), "b": torch.ones(2)})
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for anchor, velocity in (
        ({"a": torch.zeros(2)}, tensors),
        ({**tensors, "c": torch.zeros(2)}, tensors),
        ({**tensors, "b": torch.zeros(3)}, tensors),
        (tensors, {}),
    ):
        with pytest.raises(OuterStateInvalid):
            loop.restore(OuterState(steps=1, anchor=anchor, velocity=velocity))
    with pytest.raises(OuterStateInvalid, match="no average of b"):
        loop.apply({"a": torch.ones(2)})
    assert loop.state().anchor["a"].tolist() == [1.0, 1.0]


def test_codecs_that_keep_nothing_back_have_nothing_that_decays():
    states = [{RESIDUAL: torch.full((2,), 4.0)}, {RESIDUAL: torch.full((2,), 2.0)}]
    decay_residuals(segment("topk"), states, settings_of(decay=0.5))
    assert [state[RESIDUAL].tolist() for state in states] == [[2.0, 2.0], [1.0, 1.0]]
    decay_residuals(segment("qsgd"), [{}], settings_of(decay=0.5))
