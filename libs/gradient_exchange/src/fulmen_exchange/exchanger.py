"""The rounds of one rank: exchange of statistics, the policy's decision, and the sums.

Invariants: every rank has the same bits afterwards, and every decision (to skip a round, to flush, to change the codec) is
a function of numbers that all ranks have. Values that are not finite on any rank enter no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from fulmen_exchange.bucket_sums import BucketSums
from fulmen_exchange.codecs.codec import Round
from fulmen_exchange.links.link import Link
from fulmen_exchange.metrics import LARGEST, Energy, GroupReport, RankReport, RoundCosts, gather
from fulmen_exchange.outer import decay_residuals
from fulmen_exchange.policies.decision import PLAIN, CodecChoice, Decision, RoundStats, Seconds
from fulmen_exchange.policies.policy import Policy, make_policy
from fulmen_exchange.ranks import ExchangeReport, Ranks, StepInfo
from fulmen_exchange.residuals import ResidualsInvalid
from fulmen_exchange.settings import CodecSettings, OuterLoopSettings

_log = structlog.get_logger()

FORMAT = 2
"""Version of a stored state."""
SAMPLED = ("captured", "residual_norm", "sparsity", "gradient_cosine", "relative_error")
"""Group means shown in the stream of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRound:
    """The data on which the next round is decided if it begins before its own gradients are ready.

    Attributes:
        norm: Norm of this rank's gradients, before they were clipped.
        report: Statistics of all ranks.
    """

    norm: float
    report: GroupReport

    def state(self) -> dict[str, Any]:
        """Returns it as plain values."""
        report = self.report
        plain = {"norms": list(report.norms), "compute_s": report.compute_s, "means": dict(report.means)}
        return {"norm": self.norm, "present": sorted(report.present), **plain}

    @classmethod
    def of(cls, state: dict[str, Any]) -> LastRound:
        """Returns what `state` returned."""
        report = GroupReport(
            finite=True,
            norms=tuple(state["norms"]),
            compute_s=state["compute_s"],
            present=frozenset(state["present"]),
            means=state["means"],
        )
        return cls(norm=state["norm"], report=report)


@dataclass(slots=True, kw_only=True)
class OpenRound:
    """A round whose gradients come bucket by bucket.

    Attributes:
        round: The round.
        events: Events of its decision.
        energy: Collects compression statistics, if wanted.
        square: Square of the norm of this rank's gradients so far.
    """

    round: Round
    events: tuple[str, ...]
    energy: Energy | None
    square: float = 0.0


class Exchanger:
    """The rounds of one rank.

    Attributes:
        number: Number of the last round, from 1; 0 before the first. Skipped rounds do not count.
    """

    def __init__(
        self,
        settings: CodecSettings,
        *,
        parameters: Mapping[str, nn.Parameter],
        link: Link,
        seed: int,
        optimizer: str,
        copy: Ranks,
    ) -> None:
        """See `CodecReducer.open`; `parameters` are this rank's parts."""
        self.number = 0
        self._copy = copy
        self._settings = settings
        self._names = list(parameters)
        self._device = next(iter(parameters.values())).device
        self._link = link
        self._seed = seed
        self._optimizer = optimizer
        self._sums = BucketSums(settings, parameters=parameters, link=link)
        self._policy = self._new_policy()
        self._last: LastRound | None = None
        self._open: OpenRound | None = None
        self._measured: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._events: list[str] = []
        self._costs = RoundCosts()
        self._counted = _counts_of(link)

    def _new_policy(self) -> Policy:
        return make_policy(
            self._settings,
            optimizer=self._optimizer,
            world_size=self._link.size,
            gradient_bytes=4.0 * self._sums.compressed,
            supports=self._sums.supports,
        )

    @property
    def clips(self) -> bool:
        """Whether each rank's own gradients are clipped before encoding."""
        return self._sums.local_clip is not None

    def sum(self, tensors: dict[str, Tensor], step_info: StepInfo) -> bool:
        """Runs a round: replaces tensors by their sums over the ranks.

        Args:
            tensors: See `BucketSums.sum`.
            step_info: Input of the policy.

        Returns:
            False if a tensor is not finite on any rank; nothing is changed then.
        """
        self._link.begin()
        norm = self._norm(list(tensors.values()))
        report = self._gather(tensors, step_info, norm)
        self._clip(tensors, norm, report)
        if not report.finite:
            return False
        self.number += 1
        self._last = LastRound(norm=norm, report=report)
        decision = self._policy.decide(_round_stats(self.number, report))
        self._events += decision.events
        if isinstance(self._settings.outer, OuterLoopSettings):
            for memory in self._sums.codec_memories.values():
                decay_residuals(memory.codec, memory.states.values(), self._settings.outer)
        energy, round_ = self._energy(self.number), self._round(self.number, decision)
        choice = self._choice(decision)
        self._note(self._sums.sum(tensors, choice, round_, present=report.present, energy=energy), energy)
        return True

    def begin(self) -> bool:
        """Begins a round whose gradients come bucket by bucket, if there was one before: by that one it is decided on.

        Returns:
            Whether it has begun, the same on every rank.
        """
        if self._last is None:
            return False
        self._link.begin()
        number = self.number + 1
        decision = self._policy.decide(_round_stats(number, self._last.report))
        choice = self._choice(decision)
        self._open = OpenRound(round=self._round(number, decision), events=decision.events, energy=self._energy(number))
        self._sums.begin(choice)
        return True

    def add(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Sums a bucket of the round that has begun, the same one on every rank.

        Args:
            index: Index of the bucket.
            tensors: Gradients of its parameters; clipped, and set to zero where they are not finite, which is reported at
                the end.
        """
        now = self._opened()
        norm = float(nn.utils.get_total_norm(list(tensors.values())))
        now.square += norm * norm
        if not norm <= LARGEST:
            for tensor in tensors.values():
                tensor.zero_()
        elif self._last is not None:
            # This round's norm is not known yet, but it is at least the norm of the gradients so far.
            self._scale(tensors, max(self._last.norm, now.square**0.5))
        self._sums.add(index, tensors, now.round, now.energy)

    def complete(self, tensors: dict[str, Tensor], rest: Sequence[Tensor], step_info: StepInfo) -> bool:
        """Completes a round whose buckets have all been added; see `sum`.

        Args:
            tensors: All gradients, which are replaced by their sums.
            rest: Those of them that are in no bucket.
            step_info: Input of the policy for the next round.
        """
        now = self._opened()
        norm = float(nn.utils.get_total_norm(rest)) if rest else 0.0
        norm = self._of_copy(torch.tensor(now.square + norm * norm, dtype=torch.float64).sqrt())
        report = self._gather(tensors, step_info, norm)
        self._open = None
        if not report.finite:
            self._sums.undo()
            return False
        self._clip({str(place): tensor for place, tensor in enumerate(rest)}, norm, report)
        self.number += 1
        self._last = LastRound(norm=norm, report=report)
        self._events += now.events
        self._note(self._sums.finish(tensors, report.present), now.energy)
        return True

    @property
    def names_of_buckets(self) -> list[frozenset[str]]:
        """See `BucketSums`."""
        return self._sums.names_of_buckets

    def _opened(self) -> OpenRound:
        if self._open is None:
            raise AssertionError("begin() must be called before, and return true")
        return self._open

    def _choice(self, decision: Decision) -> CodecChoice:
        return decision.choice if decision.enabled or self._settings.is_private else PLAIN

    def _energy(self, number: int) -> Energy | None:
        if self._settings.is_private:
            return None
        every = self._settings.check_every
        return Energy() if self._policy.needs_energy or (every and number % every == 0) else None

    def _round(self, number: int, decision: Decision) -> Round:
        return Round(
            number=number,
            world_size=self._link.size,
            ratio=decision.ratio,
            rank=self._link.rank,
            seed=self._seed,
            flush=decision.flush,
            ratio_factor=self._settings.link.ratio_factor,
        )

    def _note(self, costs: RoundCosts, energy: Energy | None) -> None:
        self._costs += costs
        self._measured = {"codec_s": costs.encode_s + costs.decode_s, "transfer_s": costs.transfer_s}
        if energy is not None:
            self._measured |= energy.means()

    def _gather(self, tensors: Mapping[str, Tensor], step_info: StepInfo, norm: float) -> GroupReport:
        """Exchanges statistics with the other ranks."""
        means = {**self._measured, "progress": step_info.progress}
        if step_info.metric is not None:
            means["metric"] = step_info.metric
        if self._settings.is_private and norm <= LARGEST:
            norm = 1.0
        own = RankReport(norm=norm, compute_s=step_info.compute_s, present=tensors.keys(), means=means)
        began = perf_counter()
        report = gather(own, self._names, self._link, self._device)
        self._costs.wait_s += perf_counter() - began
        self._shown |= {f"exchange_{name}": report.means[name] for name in SAMPLED if name in report.means}
        return report

    def _clip(self, tensors: Mapping[str, Tensor], norm: float, report: GroupReport) -> None:
        """Clips this rank's gradients if the codec accumulates them."""
        if report.is_late and not norm <= LARGEST:
            # The others did not wait for it, so it cannot make them skip the round.
            _log.warning("exchange_late_gradients_not_finite", rank=self._link.rank, round=self.number + 1)
            for tensor in tensors.values():
                tensor.zero_()
        elif report.finite:
            self._scale(tensors, norm)

    def _scale(self, tensors: Mapping[str, Tensor], norm: float) -> None:
        """Scales gradients of a norm down to that to which the codec clips, if it does."""
        limit = self._sums.local_clip
        if limit is not None and norm > limit / self._link.size**0.5:
            for tensor in tensors.values():
                tensor.mul_(limit / self._link.size**0.5 / norm)

    def _norm(self, tensors: Sequence[Tensor]) -> float:
        """Computes the norm over all parts of a copy: its ranks clip, and skip a round, alike."""
        return self._of_copy(nn.utils.get_total_norm(tensors))

    def _of_copy(self, norm: Tensor) -> float:
        if self._copy.group is None:
            return float(norm)
        square = norm.to(device=self._device, dtype=torch.float64).square().reshape(1)
        return float(self._copy.sum(square).sqrt())

    def emit(self, event: str) -> None:
        """Adds an event, the same on every rank, to the next report."""
        self._events.append(event)

    def drain(self) -> ExchangeReport:
        """Returns the report since the last call; what is measured in a round appears with the next one."""
        link, costs = self._link, self._costs
        counted = _counts_of(link)
        for name, now in counted.items():
            setattr(costs, name, now - self._counted[name])
        found = ExchangeReport(
            metrics=costs.metrics() | self._shown if costs.rounds else {}, events=tuple(self._events)
        )
        if costs.rounds:
            self._costs, self._shown, self._counted = RoundCosts(), {}, counted
        self._events = []
        return found

    def state(self) -> dict[str, Any]:
        """Returns this rank's state."""
        return {
            "format": FORMAT,
            "rank": self._link.rank,
            "number": self.number,
            "measured": dict(self._measured),
            "last": None if self._last is None else self._last.state(),
            "policy": self._policy.state(),
            "codecs": self._sums.state(),
        }

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that all former ranks returned; without states, starts as new.

        Of n ranks, rank r restores the states whose rank modulo n is r.

        Raises:
            ResidualsInvalid: if the states belong to another run.
            PolicyStateInvalid: if they belong to another policy.
        """
        if any(state.get("format") != FORMAT for state in states):
            raise ResidualsInvalid("exchange state stored by another version")
        link = self._link
        mine = [place for place, state in enumerate(states) if state["rank"] % link.size == link.rank % link.size]
        self._sums.restore([state["codecs"] for state in states], mine=mine)
        self._policy = self._new_policy()
        self.number, self._measured, self._last, self._open = 0, {}, None, None
        if states:
            self._policy.restore(states[0]["policy"])
            self.number = states[0]["number"]
            self._measured = dict(states[mine[0]]["measured"]) if mine else {}
            self._last = self._restored([states[place].get("last") for place in mine], world_size=len(states))

    def _restored(self, lasts: Sequence[dict[str, Any] | None], *, world_size: int) -> LastRound | None:
        """Returns the last round of a rank that has the states of one; with another number of ranks there is none."""
        if len(lasts) != 1 or lasts[0] is None or world_size != self._link.size:
            return None
        return LastRound.of(lasts[0])


def _counts_of(link: Link) -> dict[str, int]:
    """Returns what a link counts, by the names of `RoundCosts`."""
    names = ("sent_bytes", "received_bytes", "up_bytes", "down_bytes", "missed_sums")
    return {name: getattr(link, name) for name in names}


def _round_stats(number: int, report: GroupReport) -> RoundStats:
    means, seconds = report.means, None
    if "codec_s" in means and "transfer_s" in means:
        seconds = Seconds(compute_s=report.compute_s, codec_s=means["codec_s"], transfer_s=means["transfer_s"])
    return RoundStats(
        number=number,
        progress=means["progress"],
        gradient_norms=report.norms,
        captured=means.get("captured"),
        residual=means.get("residual_norm"),
        sparsity=means.get("sparsity"),
        metric=means.get("metric"),
        seconds=seconds,
    )
