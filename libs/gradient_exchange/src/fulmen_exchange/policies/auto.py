"""Measures the first rounds, predicts what a step costs in each choice, and takes the cheapest that is worth it.

Ways come in the order of what they lose: none first. A choice is worth it if it is faster, by more than the gain that is
asked for, than all that lose less. A choice that stands gives choice to one that loses more by the same rule, and to one that
loses less only when its own gain over that has shrunk to half: so nothing flutters.

Later only the candidates that cost little are measured again; if these have become faster or slower by so much that it could
matter, so are all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from fulmen_exchange.policies.cost_model import Exchange, Measured, Model, Step, Topology, break_even, calibrate
from fulmen_exchange.policies.decision import CodecChoice, Proposal, RoundStats, Seconds
from fulmen_exchange.policies.settings import AutoPolicy
from fulmen_exchange.policies.state import dump, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What rounds in a choice took, in the median."""

    choice: CodecChoice
    seconds: Seconds


@dataclass(slots=True)
class AutoState:
    """What is remembered: what is still to be measured, what was just now and before, and what was chosen."""

    queue: list[CodecChoice] = field(default_factory=list)
    seen: list[Seconds] = field(default_factory=list)
    sampled_choice: CodecChoice | None = None
    fresh: list[Sample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    chosen: CodecChoice | None = None
    measure_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicts steps from samples.

    Attributes:
        gradient_bytes: Of all gradients, as float32.
        world_size: Ranks.
        overlap: Of the settings.
        compute_s: Of a step, but for the exchange.
        model: Its slowdown is seconds per byte.
        samples: Of every kind of choice that was measured.
    """

    gradient_bytes: float
    world_size: int
    overlap: float
    compute_s: float
    model: Model
    samples: tuple[Sample, ...]

    @classmethod
    def of(
        cls, samples: Sequence[Sample], *, gradient_bytes: float, world_size: int, overlap: float = 0.0
    ) -> Prediction:
        """Fits the wire to samples, at least two."""
        points = [
            Measured(
                step=Step(exchange=exchange_for(one.choice, gradient_bytes, world_size), compute_s=0.0),
                step_s=max(one.seconds.transfer_s, 1e-9),
            )
            for one in samples
        ]
        return cls(
            gradient_bytes=gradient_bytes,
            world_size=world_size,
            overlap=overlap,
            compute_s=median(one.seconds.compute_s for one in samples),
            model=calibrate(points, overlaps=(0.0,)),
            samples=tuple(samples),
        )

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth that was found; infinity if bytes took no time."""
        return 1.0 / self.model.slowdown if self.model.slowdown else inf

    def step_s(self, choice: CodecChoice, *, bytes_per_s: float | None = None) -> float:
        """Predicts the seconds of a step, at the bandwidth that was found or at another one.

        What the model is off by in the sample of a kind of candidates, it is taken to be off by in all of that kind.
        """
        [sample] = [one for one in self.samples if one.choice.key == choice.key]
        fitted = self._wire_s(sample.choice, self.model)
        off_by = sample.seconds.transfer_s / fitted if fitted > 0 else 1.0
        model = self.model if bytes_per_s is None else replace(self.model, slowdown=1.0 / bytes_per_s)
        wire_s = self._wire_s(choice, model) * off_by
        return self.compute_s + max(0.0, wire_s - self.overlap * self.compute_s) + sample.seconds.codec_s

    def _wire_s(self, choice: CodecChoice, model: Model) -> float:
        return model.wire_s(Step(exchange=exchange_for(choice, self.gradient_bytes, self.world_size), compute_s=0.0))

    def pays_below(self, candidates: Sequence[CodecChoice]) -> float:
        """Finds the bandwidth, in bytes per second, below which any of the candidates but the first is faster than that."""
        return max(
            (
                break_even(
                    lambda rate: self.step_s(candidates[0], bytes_per_s=rate),
                    lambda rate, choice=choice: self.step_s(choice, bytes_per_s=rate),  # type: ignore[misc]  # bound early
                )
                for choice in candidates[1:]
            ),
            default=0.0,
        )


def exchange_for(choice: CodecChoice, gradient_bytes: float, world_size: int) -> Exchange:
    """Says what a choice exchanges."""
    topology = Topology.RING if choice.uses_ring else Topology.SHARDED
    return Exchange(topology=topology, world_size=world_size, gradient_bytes=gradient_bytes, ratio=choice.bytes_ratio)


class Auto:
    """Chooses by the cost model."""

    needs_energy = False

    def __init__(
        self, candidates: Sequence[CodecChoice], settings: AutoPolicy, *, gradient_bytes: float, world_size: int
    ) -> None:
        """Makes it.

        Args:
            candidates: From what loses nothing to what loses most; at least two kinds, the first without compression.
            settings: Its settings.
            gradient_bytes: Of all gradients, as float32.
            world_size: Ranks.
        """
        self._candidates = tuple(candidates)
        self._settings = settings
        self._gradient_bytes = gradient_bytes
        self._world_size = world_size
        kinds = {choice.key: choice for choice in reversed(self._candidates)}
        self._kinds = [kinds[key] for key in dict.fromkeys(choice.key for choice in self._candidates)]
        self._state = AutoState(queue=list(self._kinds))

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        state = self._state
        events: tuple[str, ...] = ()
        if state.queue and now is not None and stats.seconds is not None and now.key == state.queue[0].key:
            self._sample(now, stats.seconds)
            if not state.queue and self._merge():
                events = self._decide(stats.number)
        if not state.queue and self._settings.measure_every and stats.number >= state.measure_at:
            state.queue = self._affordable()
            state.measure_at = stats.number + self._settings.measure_every
        if state.queue:
            return Proposal(choice=state.queue[0], reason="measures what it costs", events=events)
        assert state.chosen is not None
        return Proposal(choice=state.chosen, reason="the cheapest, by what was measured", events=events)

    def _sample(self, now: CodecChoice, seconds: Seconds) -> None:
        state = self._state
        if now != state.sampled_choice:
            state.seen, state.sampled_choice = [], now
        state.seen.append(seconds)
        if len(state.seen) < self._settings.probe_rounds:
            return
        counted = state.seen[1:] or state.seen
        found = Seconds(
            compute_s=median(one.compute_s for one in counted),
            codec_s=median(one.codec_s for one in counted),
            transfer_s=median(one.transfer_s for one in counted),
        )
        state.fresh.append(Sample(choice=now, seconds=found))
        state.seen, state.sampled_choice = [], None
        state.queue.pop(0)

    def _merge(self) -> bool:
        """Takes what was measured just now in; false if it says that all else has to be measured, too."""
        state = self._state
        before = {one.choice.key: one.seconds for one in state.samples}
        fresh = {one.choice.key for one in state.fresh}
        stale = [one for one in state.samples if one.choice.key not in fresh]
        if stale and state.chosen is not None:
            least = self._settings.gain * self._prediction().step_s(state.chosen)
            changes = [abs(one.seconds.transfer_s - before[one.choice.key].transfer_s) for one in state.fresh]
            if max(changes) > least:
                state.queue = [choice for choice in self._kinds if choice.key not in fresh]
                return False
        state.samples, state.fresh = [*stale, *state.fresh], []
        return True

    def _prediction(self) -> Prediction:
        return Prediction.of(
            self._state.samples,
            gradient_bytes=self._gradient_bytes,
            world_size=self._world_size,
            overlap=self._settings.overlap,
        )

    def _decide(self, number: int) -> tuple[str, ...]:
        """Chooses; returns what is to be told of it."""
        state, prediction = self._state, self._prediction()
        steps = {choice: prediction.step_s(choice) for choice in self._candidates}
        before, state.chosen = state.chosen, self._pick(steps)
        state.measure_at = number + self._settings.measure_every
        dense, below = self._candidates[0], prediction.pays_below(self._candidates)
        told = (
            f"{state.chosen.text}: {steps[state.chosen]:.3g} s a step predicted, {steps[dense]:.3g} s with"
            f" {dense.text}, at {_rate(prediction.bytes_per_s)} and {prediction.compute_s:.3g} s of computing;"
            f" compression pays below {_rate(below)} with this model and these machines"
        )
        return () if before == state.chosen else (told,)

    def _pick(self, steps: dict[CodecChoice, float]) -> CodecChoice:
        gain, now = self._settings.gain, self._state.chosen
        best = self._candidates[0]
        for choice in self._candidates[1:]:
            if steps[choice] < (1.0 - gain) * steps[best]:
                best = choice
        if now is None or best == now:
            return best
        if self._candidates.index(best) > self._candidates.index(now):
            return best if steps[best] < (1.0 - gain) * steps[now] else now
        return best if steps[now] > (1.0 - gain / 2) * steps[best] else now

    def _affordable(self) -> list[CodecChoice]:
        """Returns the kinds that can be measured again in the share of time that this may take; the cheapest always."""
        assert self._state.chosen is not None
        prediction = self._prediction()
        steps = {choice: prediction.step_s(choice) for choice in self._kinds}
        settings = self._settings
        left = settings.measure_share * settings.measure_every * prediction.step_s(self._state.chosen)
        chosen: list[CodecChoice] = []
        for choice in sorted(steps, key=lambda each: steps[each]):
            left -= settings.probe_rounds * steps[choice]
            if chosen and left < 0:
                break
            chosen.append(choice)
        return [choice for choice in self._kinds if choice in chosen]

    def state(self) -> dict[str, object]:
        """See `Chooser`."""
        return dump(self._state)

    def restore(self, plain: object) -> None:
        """See `Chooser`."""
        self._state = load(AutoState, plain)


def _rate(bytes_per_s: float) -> str:
    """Names a bandwidth for a person."""
    if bytes_per_s in (0.0, inf):
        return "no bandwidth" if not bytes_per_s else "any bandwidth"
    megabits = bytes_per_s * 8 / 1e6
    return f"{megabits / 1e3:.3g} Gbit/s" if megabits >= 1e3 else f"{megabits:.3g} Mbit/s"
