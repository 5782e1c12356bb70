"""Sums the gradients of ranks through a codec; implements `GradientReducer` of the algorithm service.

Of weights that are in parts on several ranks, each rank exchanges its own part with the ranks that hold the same part.

Invariants: every rank has the same bits afterwards. A gradient that is not finite on any rank enters no state: all ranks
skip the step, as they would without a codec. A parameter without gradient on any rank keeps none, unless a residual of it
is sent. With an outer loop, gradients stay local and the effect of the local steps is exchanged; wherever weights are
read, all ranks have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fulmen_exchange.errors import RanksDiverged
from fulmen_exchange.exchanger import Exchanger
from fulmen_exchange.links.link import Link
from fulmen_exchange.outer import OuterState, OuterSteps
from fulmen_exchange.parts import Part, local, placed
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.residuals import ParameterSlices, merge
from fulmen_exchange.settings import CodecSettings, OuterLoopSettings

WHOLE = Ranks()
"""One rank that holds all parameters."""


class CodecReducer:
    """Sums gradients through a codec. Created by `open`."""

    def __init__(
        self, settings: CodecSettings, *, parameters: Mapping[str, nn.Parameter], link: Link, exchanger: Exchanger
    ) -> None:
        """See `open`."""
        self._settings = settings
        self._parameters = parameters
        self._part = Part.of(parameters)
        self._weights = _weights(parameters)
        self._link = link
        self._exchanger = exchanger
        self._step_info = StepInfo()
        self._outer: OuterSteps | None = None
        if isinstance(settings.outer, OuterLoopSettings):
            self._outer = OuterSteps(settings.outer)
            self._outer.begin(self._weights)

    @classmethod
    def open(
        cls,
        settings: CodecSettings,
        *,
        parameters: Mapping[str, nn.Parameter],
        link: Link,
        seed: int,
        optimizer: str,
        copy: Ranks = WHOLE,
    ) -> CodecReducer:
        """Creates the reducer without sending anything.

        Args:
            settings: Settings of the codec, its policy and its outer loop.
            parameters: Parameters by name, the same on every rank and in the same order; frozen ones are ignored. Of
                distributed tensors, spread by rows over one dimension of ranks, each rank exchanges its own part.
            link: Link to the other ranks that hold the same part.
            seed: Seed of random numbers, the same on every rank.
            optimizer: Kind of the optimiser, `adamw` or `sgd`, which limits the choices of the policy `auto`.
            copy: Ranks that hold the parts of one copy of the parameters.

        Raises:
            PartsUnsupported: if a parameter is spread in another way.
        """
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        parts = {name: nn.Parameter(weight) for name, weight in _weights(trained).items()}
        exchanger = Exchanger(settings, parameters=parts, link=link, seed=seed, optimizer=optimizer, copy=copy)
        return cls(settings, parameters=trained, link=link, exchanger=exchanger)

    @property
    def clips_sums(self) -> bool:
        """See `GradientReducer`."""
        return not self._exchanger.clips

    @property
    def steps_locally(self) -> bool:
        """See `GradientReducer`."""
        return self._outer is not None

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self._exchanger.number

    def reduce(self, parameters: Sequence[nn.Parameter], ranks: Ranks, step_info: StepInfo) -> None:
        """See `GradientReducer`; the parameters must be those passed to `open`.

        Raises:
            RanksDiverged: if the ranks no longer hold the same weights.
        """
        gradients = self._gradients(self._parameters)
        if self._outer is not None:
            # Losses are normalised over the rows of all ranks: scale to the size of the sum.
            for gradient in gradients.values():
                gradient.mul_(self._link.size)
            self._step_info = replace(step_info, compute_s=self._step_info.compute_s + step_info.compute_s)
            return
        self._replace(gradients, is_summed=self._exchanger.sum(gradients, step_info))

    @property
    def names_of_buckets(self) -> list[frozenset[str]]:
        """See `BucketSums`."""
        return self._exchanger.names_of_buckets

    def begin(self) -> bool:
        """Begins a round before its gradients are ready; see `Exchanger.begin`."""
        return self._outer is None and self._exchanger.begin()

    def add(self, bucket: int) -> None:
        """Sums a bucket of the round that has begun, once the gradients of its parameters are ready.

        All ranks add all buckets in the same order.
        """
        self._exchanger.add(bucket, self._gradients(self.names_of_buckets[bucket]))

    def complete(self, step_info: StepInfo) -> None:
        """Completes a round whose buckets have all been added; see `reduce`."""
        gradients = self._gradients(self._parameters)
        in_buckets = frozenset[str]().union(*self.names_of_buckets)
        rest = [gradient for name, gradient in gradients.items() if name not in in_buckets]
        self._replace(gradients, is_summed=self._exchanger.complete(gradients, rest, step_info))

    def _gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the gradients of some parameters, as far as they have any, in the order of the parameters."""
        wanted = frozenset(names)
        return {name: local(p.grad) for name, p in self._parameters.items() if name in wanted and p.grad is not None}

    def _replace(self, gradients: dict[str, Tensor], *, is_summed: bool) -> None:
        if not is_summed:
            # Makes every rank skip the step.
            for gradient in gradients.values():
                gradient.fill_(float("nan"))
            return
        for name, parameter in self._parameters.items():
            sum_ = gradients.get(name)
            parameter.grad = None if sum_ is None else placed(sum_, parameter)
        self._check_weights()

    def on_step(self) -> None:
        """See `GradientReducer`."""
        if self._outer is not None:
            self._outer.on_step()
            if self._outer.due():
                self._step(self._outer)

    def synchronize(self) -> None:
        """See `GradientReducer`."""
        if self._outer is not None and self._outer.moved:
            self._step(self._outer)

    def _step(self, outer: OuterSteps) -> None:
        """Takes an outer step."""
        moved = outer.pseudo_gradients()
        if self._exchanger.sum(moved, self._step_info):
            averages = {name: sum_.div_(self._link.size) for name, sum_ in moved.items()}
        else:
            averages = {name: torch.zeros_like(one) for name, one in moved.items()}
            self._exchanger.emit("weights of a rank were not finite: all ranks returned to the last outer step")
        self._step_info = replace(self._step_info, compute_s=0.0)
        outer.apply(averages)
        self._check_weights()

    def drain(self) -> ExchangeReport:
        """See `GradientReducer`."""
        return self._exchanger.drain()

    def _check_weights(self) -> None:
        """Compares a digest of the weights with the other ranks' every `check_every` rounds."""
        every = self._settings.check_every
        if not every or self.rounds % every:
            return
        digest = hashlib.sha256()
        for weight in self._weights.values():
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        device = next(iter(self._weights.values())).device
        own = torch.tensor(list(digest.digest()[:16]), dtype=torch.float32, device=device)
        sum_ = own.clone()
        self._link.all_reduce(sum_)
        if not torch.equal(sum_, own * self._link.size):
            raise RanksDiverged(f"ranks hold different weights in round {self.rounds}")

    def state(self) -> dict[str, Any]:
        """See `GradientReducer`; anchors that equal the weights are omitted."""
        state = {**self._exchanger.state(), "part": self._part.index, "parts": self._part.count}
        state["codecs"] = [{**one, **{key: self._part.stored(one[key]) for key in _SLICES}} for one in state["codecs"]]
        if self._outer is not None:
            outer = self._outer.state()
            slices: ParameterSlices = {}
            for name, weight in self._weights.items():
                found = {"velocity": outer.velocity.get(name), "anchor": outer.anchor[name]}
                if torch.equal(outer.anchor[name], weight.float()):
                    del found["anchor"]
                tensors = {key: one.cpu().flatten().clone() for key, one in found.items() if one is not None}
                if tensors:
                    slices[name] = {"begin": 0, "tensors": tensors}
            state["outer"] = {"steps": outer.steps, "slices": self._part.stored(slices)}
        return state

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """See `GradientReducer`. The weights must be restored before; without states, it starts as new from them.

        Bit for bit with the same number of ranks and parts; otherwise the sum of the residuals is the same.

        Raises:
            ResidualsInvalid: if the states belong to another run.
            PolicyStateInvalid: if they belong to another policy.
            OuterStateInvalid: if they belong to another outer loop.
        """
        kept = self._part.of_states(states)
        cut = [
            [{**one, **{key: self._part.taken(one[key]) for key in _SLICES}} for one in state["codecs"]]
            for state in kept
        ]
        self._exchanger.restore([{**state, "codecs": codecs} for state, codecs in zip(kept, cut, strict=True)])
        if self._outer is None:
            return
        self._outer.begin(self._weights)
        if kept:
            self._restore_outer(self._outer, [state for state in kept if state["rank"] == kept[0]["rank"]])

    def _restore_outer(self, outer: OuterSteps, states: Sequence[dict[str, Any]]) -> None:
        """Restores the outer loop from the states of the parts of one copy."""
        stored = [state["outer"] for state in states if "outer" in state]
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        merged = merge((self._part.taken(one["slices"]) for one in stored), sizes)
        anchor = dict(outer.state().anchor)
        # Of a parameter with few rows some parts are empty, and nothing is stored.
        velocity = {name: one for name, one in outer.state().velocity.items() if not one.numel()}
        for name, tensors in merged.items():
            for key, found in (("anchor", anchor), ("velocity", velocity)):
                if key in tensors:
                    found[name] = tensors[key].view(self._weights[name].shape)
        steps = stored[0]["steps"] if stored else 0
        outer.restore(OuterState(steps=steps, anchor=anchor, velocity=velocity))


_SLICES = ("states", "shard")
"""Tensors of a codec's state that are stored by parameter."""


def _weights(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns this rank's parts of parameters, in the same memory."""
    return {name: local(parameter.detach()) for name, parameter in parameters.items()}
