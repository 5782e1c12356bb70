"""The outer loop: ranks take optimiser steps of their own, and exchange what these have moved the weights by.

Sources: DiLoCo, arXiv:2311.08105, algorithm 1 (pseudo-gradients, outer Nesterov momentum); SparseLoCo,
arXiv:2508.15706, algorithm 1 (error feedback with decay, sparse and quantised pseudo-gradients, no outer momentum).
Unlike there, shards that reply in sparse form keep an error of their own, which does not decay.

Invariants: after an outer step every rank has the same bits, for it is computed from the anchor, which all have, and
from averages that all were given; what a rank's own steps did is in its pseudo-gradient and nowhere else. Moments of
the inner optimiser stay with their rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulmen_exchange.codecs.codec import Codec, State
from fulmen_exchange.settings import OuterLoopSettings


class OuterStateInvalid(Exception):
    """A state does not fit the parameters; the text names one that does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterState:
    """What a checkpoint stores of an outer loop.

    Attributes:
        steps: Taken since the last outer step.
        anchor: Weights of the last outer step by name, float32.
        velocity: Of the outer momentum by name, float32; empty without momentum.
    """

    steps: int
    anchor: Mapping[str, Tensor]
    velocity: Mapping[str, Tensor]


class OuterLoop:
    """Counts steps, makes pseudo-gradients, applies their averages. It talks to nobody: the caller exchanges."""

    def __init__(self, settings: OuterLoopSettings) -> None:
        self._settings = settings
        self._parameters: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self._steps = 0

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes the parameters, by name, whose values are the same on every rank; they are changed in place later."""
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        # Float32 whatever the weights are: small outer steps would be lost in 16 bits.
        self._anchor = {name: parameter.float().clone() for name, parameter in self._parameters.items()}
        momentum = self._settings.momentum > 0
        self._velocity = {name: torch.zeros_like(one) for name, one in self._anchor.items() if momentum}
        self._steps = 0

    def on_step(self) -> None:
        """Counts a step of the inner optimiser; one that was skipped by all ranks counts too."""
        self._steps += 1

    @property
    def moved(self) -> bool:
        """Whether any step was taken since the last outer one."""
        return self._steps > 0

    def due(self) -> bool:
        """Tells whether it is time for an exchange, alike on every rank."""
        return self._steps >= self._settings.steps

    def pseudo_gradients(self) -> dict[str, Tensor]:
        """Returns what to exchange: anchor less weights, by name, float32; it points where a gradient would."""
        return {name: anchor - self._parameters[name].float() for name, anchor in self._anchor.items()}

    def apply(self, averages: Mapping[str, Tensor]) -> None:
        """Takes the outer step from the anchor, and sets the weights to where it leads.

        With momentum m and average d: v = m v + d, anchor = anchor - learning rate (d + m v), Nesterov's as PyTorch's
        SGD has it; without momentum anchor = anchor - learning rate d.

        Args:
            averages: Of the pseudo-gradients over the ranks that took part, by name; the same bits on every rank.

        Raises:
            OuterStateInvalid: if one is missing; nothing is changed then.
        """
        if missing := self._anchor.keys() - averages.keys():
            raise OuterStateInvalid(f"no average of {min(missing)}")
        settings = self._settings
        for name, anchor in self._anchor.items():
            step = averages[name].float()
            if settings.momentum:
                velocity = self._velocity[name].mul_(settings.momentum).add_(step)
                step = step + settings.momentum * velocity
            anchor.sub_(settings.learning_rate * step)
            self._parameters[name].copy_(anchor)
        self._steps = 0

    def state(self) -> OuterState:
        """Returns what is to be stored: the tensors themselves, which the next outer step changes."""
        return OuterState(steps=self._steps, anchor=dict(self._anchor), velocity=dict(self._velocity))

    def restore(self, state: OuterState) -> None:
        """Goes on from a state, after `begin` with the parameters that stood then.

        Raises:
            OuterStateInvalid: if it is one of other parameters, or of other settings; nothing is changed then.
        """
        pairs = ((self._anchor, state.anchor), (self._velocity, state.velocity))
        for own, stored in pairs:
            for name in own.keys() | stored.keys():
                if name not in own or name not in stored or own[name].shape != stored[name].shape:
                    raise OuterStateInvalid(f"{name} is not what it was")
        for own, stored in pairs:
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        self._steps = state.steps


def decay_residuals(codec: Codec, states: Iterable[State], settings: OuterLoopSettings) -> None:
    """Multiplies what a rank's codec has kept back by beta, before a round: e = beta e + pseudo-gradient.

    Residuals hold what older outer steps were to do, from weights that have moved since. Source: arXiv:2508.15706.

    Args:
        codec: Whose states they are.
        states: Of the rank's buckets; changed in place.
        settings: Of the loop.
    """
    for state in states:
        if codec.kept is not None:
            state[codec.kept].mul_(settings.decay)
