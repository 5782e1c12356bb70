"""Picks the fastest codec: measures the first rounds and predicts the step time of each candidate.

Candidates are ordered from lossless to most lossy. A candidate wins if it is faster by more than the required gain than
every less lossy one. The current choice is replaced by a lossier one under the same rule, and by a less lossy one only
once its own gain has shrunk to half, so that the choice does not oscillate.

Later only cheap candidates are measured again. If their times have changed enough to matter, all others are measured too.
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
    """Median times of rounds with one codec."""

    choice: CodecChoice
    seconds: Seconds


@dataclass(slots=True)
class AutoState:
    """Pending measurements, current and previous samples, and the choice."""

    queue: list[CodecChoice] = field(default_factory=list)
    seen: list[Seconds] = field(default_factory=list)
    sampled_choice: CodecChoice | None = None
    fresh: list[Sample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    chosen: CodecChoice | None = None
    measure_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicts step times from samples.

    Attributes:
        gradient_bytes: Bytes of all gradients, as float32.
        world_size: Number of ranks.
        overlap: See `AutoPolicy`.
        compute_s: Seconds of a step without the exchange.
        model: The fitted model; its slowdown is seconds per byte.
        samples: One for every measured codec.
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
        """Fits the model to at threshold_s two samples."""
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
        """The fitted bandwidth; infinity if bytes cost no time."""
        return 1.0 / self.model.slowdown if self.model.slowdown else inf

    def step_s(self, choice: CodecChoice, *, bytes_per_s: float | None = None) -> float:
        """Predicts the seconds of a step, at the fitted bandwidth or another one.

        The model's relative error on a codec's sample is assumed for all choices with that codec.
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
        """Returns the bandwidth in bytes per second below which any candidate beats the first one."""
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
    """Returns the exchange that a choice causes."""
    topology = Topology.RING if choice.uses_ring else Topology.SHARDED
    return Exchange(
        topology=topology,
        world_size=world_size,
        gradient_bytes=gradient_bytes,
        ratio=choice.bytes_ratio,
        union=choice.ratio is not None,  # the default of codecs with a ratio; with `ratio_down` less comes back
    )


class Auto:
    """Chooses by the cost model."""

    needs_energy = False

    def __init__(
        self, candidates: Sequence[CodecChoice], settings: AutoPolicy, *, gradient_bytes: float, world_size: int
    ) -> None:
        """Plans to measure every codec.

        Args:
            candidates: From lossless to most lossy; at threshold_s two codecs, the first without compression.
            settings: Settings of the policy.
            gradient_bytes: Bytes of all gradients, as float32.
            world_size: Number of ranks.
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
            return Proposal(choice=state.queue[0], reason="measuring", events=events)
        assert state.chosen is not None
        return Proposal(choice=state.chosen, reason="fastest by measurement", events=events)

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
        """Merges fresh samples; returns False if they show that all others must be measured again."""
        state = self._state
        before = {one.choice.key: one.seconds for one in state.samples}
        fresh = {one.choice.key for one in state.fresh}
        stale = [one for one in state.samples if one.choice.key not in fresh]
        if stale and state.chosen is not None:
            threshold_s = self._settings.gain * self._prediction().step_s(state.chosen)
            changes = [abs(one.seconds.transfer_s - before[one.choice.key].transfer_s) for one in state.fresh]
            if max(changes) > threshold_s:
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
        """Picks a candidate; returns the events to report."""
        state, prediction = self._state, self._prediction()
        steps = {choice: prediction.step_s(choice) for choice in self._candidates}
        before, state.chosen = state.chosen, self._pick(steps)
        state.measure_at = number + self._settings.measure_every
        dense, below = self._candidates[0], prediction.pays_below(self._candidates)
        event = (
            f"{state.chosen.text}: {steps[state.chosen]:.3g} s a step predicted, {steps[dense]:.3g} s with"
            f" {dense.text}, at {_rate(prediction.bytes_per_s)} and {prediction.compute_s:.3g} s of computing;"
            f" compression pays off below {_rate(below)} with this model and these machines"
        )
        return () if before == state.chosen else (event,)

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
        """Returns the codecs that can be measured again within the time budget; always the cheapest."""
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
    """Formats a bandwidth."""
    if bytes_per_s in (0.0, inf):
        return "no bandwidth" if not bytes_per_s else "any bandwidth"
    megabits = bytes_per_s * 8 / 1e6
    return f"{megabits / 1e3:.3g} Gbit/s" if megabits >= 1e3 else f"{megabits:.3g} Mbit/s"
