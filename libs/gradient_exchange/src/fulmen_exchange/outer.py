"""The outer loop: ranks take local optimiser steps and exchange the resulting change of the weights.

Sources: DiLoCo, arXiv:2311.08105, algorithm 1 (pseudo-gradients, outer Nesterov momentum); SparseLoCo, arXiv:2508.15706,
algorithm 1 (error feedback with decay, sparse and quantised pseudo-gradients, no outer momentum). With `ratio_down` shards keep
a residual of their own, which does not decay.

Invariants: after an outer step all ranks have the same bits, since it is computed from the shared anchor and averages; a
rank's local steps affect others only through its pseudo-gradient. Moments of the local optimiser stay local.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulmen_exchange.codecs.codec import Codec, State
from fulmen_exchange.settings import OuterLoopSettings


class OuterStateInvalid(Exception):
    """A stored state does not match the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterState:
    """Stored state of an outer loop.

    Attributes:
        steps: Local steps since the last outer step.
        anchor: Weights after the last outer step by name, float32.
        velocity: Outer momentum by name, float32; empty without momentum.
    """

    steps: int
    anchor: Mapping[str, Tensor]
    velocity: Mapping[str, Tensor]


class OuterSteps:
    """Counts local steps, computes pseudo-gradients and applies their averages. The caller exchanges them."""

    def __init__(self, settings: OuterLoopSettings) -> None:
        self._settings = settings
        self._parameters: dict[str, Tensor] = {}
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self._steps = 0

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the parameters, by name, with equal values on every rank; they are changed in place later."""
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        # Always float32: small outer steps would be lost in 16 bits.
        self._anchor = {name: parameter.float().clone() for name, parameter in self._parameters.items()}
        momentum = self._settings.momentum > 0
        self._velocity = {name: torch.zeros_like(one) for name, one in self._anchor.items() if momentum}
        self._steps = 0

    def on_step(self) -> None:
        """Counts a local step, including one that all ranks skipped."""
        self._steps += 1

    @property
    def moved(self) -> bool:
        """Whether a local step was taken since the last outer one."""
        return self._steps > 0

    def due(self) -> bool:
        """Returns whether an outer step is due; the same on every rank."""
        return self._steps >= self._settings.steps

    def pseudo_gradients(self) -> dict[str, Tensor]:
        """Returns anchor minus weights by name, float32; it points like a gradient."""
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
        """Returns the state; its tensors are changed by the next outer step."""
        return OuterState(steps=self._steps, anchor=dict(self._anchor), velocity=dict(self._velocity))

    def restore(self, state: OuterState) -> None:
        """Restores a state after `begin` with the parameters of that time.

        Raises:
            OuterStateInvalid: if it belongs to other parameters or settings; nothing is changed then.
        """
        pairs = ((self._anchor, state.anchor), (self._velocity, state.velocity))
        for own, stored in pairs:
            for name in own.keys() | stored.keys():
                if name not in own or name not in stored or own[name].shape != stored[name].shape:
                    raise OuterStateInvalid(f"{name} does not match the stored state")
        for own, stored in pairs:
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        self._steps = state.steps


def decay_residuals(codec: Codec, states: Iterable[State], settings: OuterLoopSettings) -> None:
    """Multiplies a codec's residuals by beta before a round: e = beta e + pseudo-gradient.

    Residuals contain outer updates for weights that have since moved. Source: arXiv:2508.15706.

    Args:
        codec: The codec.
        states: Its states of the rank's buckets; changed in place.
        settings: Settings of the outer loop.
    """
    for state in states:
        if codec.residual_name is not None:
            state[codec.residual_name].mul_(settings.decay)
