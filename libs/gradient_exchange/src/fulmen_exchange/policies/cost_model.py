"""What a training step costs, by the way its gradients are sent: a model with few parameters, fitted to measured steps.

    step = compute + max(0, wire - overlap * compute) + codec
    wire = bytes / line * slowdown + messages * latency

G is the gradient's size as float32, N the number of ranks, k = 1 / ratio the share of G that a rank sends:

| topology | bytes of a rank, each way | messages |
|---|---|---|
| ring all-reduce (Patarasuk and Yuan, 2009) | 2 (N - 1) / N k G | 2 (N - 1) |
| sharded aggregator, its reply sparse again | 2 k G (N - 1) / N | 2 |
| the same, its reply the union of what came | (1 + N^0.62) k G (N - 1) / N, the reply at most dense | 2 |
| all-gather | (N - 1) k G | N - 1 |

The exponent of the union was measured with 2 to 32 ranks with error feedback; beyond that it is extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, log

import numpy as np
from numpy.typing import NDArray

UNION_EXPONENT = 0.62
OVERLAPS = tuple(step / 20 for step in range(21))
_ROUNDS = 20
_SLOWEST, _FASTEST = 1.0, 1e15
"""Bytes per second between which a break-even is looked for."""

Floats = NDArray[np.float64]


class Topology(StrEnum):
    """Who sends what to whom."""

    RING = "ring"
    SHARDED = "sharded"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of all gradients.

    Attributes:
        topology: Who sends what to whom.
        world_size: N.
        gradient_bytes: G, as float32.
        ratio: Bytes of float32 for each byte that a rank sends.
        union: Whether a sharded aggregator replies with all that came, and not with the largest of it.
    """

    topology: Topology
    world_size: int
    gradient_bytes: float
    ratio: float = 1.0
    union: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes through the line of a rank, in the direction that has more of them, or in both if they take turns."""
        ranks, sent = self.world_size, self.gradient_bytes / self.ratio
        match self.topology:
            case Topology.RING:
                return 2 * (ranks - 1) / ranks * sent
            case Topology.GATHER:
                return (ranks - 1) * sent
            case Topology.SHARDED:
                back = min(sent * ranks**UNION_EXPONENT, self.gradient_bytes) if self.union else sent
                return (sent + back) * (ranks - 1) / ranks

    @property
    def messages(self) -> int:
        """Messages that wait for each other."""
        if self.world_size == 1:
            return 0
        match self.topology:
            case Topology.RING:
                return 2 * (self.world_size - 1)
            case Topology.GATHER:
                return self.world_size - 1
            case Topology.SHARDED:
                return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step, but for how long it takes.

    Attributes:
        exchange: Of its gradients.
        compute_s: Seconds of everything else.
        codec: Who encodes and decodes; its seconds per byte are fitted where `codec_s` is None.
        codec_s: Seconds of encoding, summing and decoding, where they were measured.
        line_bytes_per_s: What the line is said to carry; 1 where nobody knows, so that the slowdown is seconds per
            byte.
    """

    exchange: Exchange
    compute_s: float
    codec: str = "none"
    codec_s: float | None = 0.0
    line_bytes_per_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step and the seconds that it took."""

    step: Step
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters of machines and network.

    Attributes:
        slowdown: Seconds that a byte takes over those that the rate of the line says.
        latency_s: Of one message.
        overlap: Share of the computing during which gradients are sent already.
        codec_s_per_byte: Of G, by codec.
    """

    slowdown: float = 1.0
    latency_s: float = 0.0
    overlap: float = 0.0
    codec_s_per_byte: Mapping[str, float] = field(default_factory=dict)

    def wire_s(self, step: Step) -> float:
        """Predicts the seconds on the wire, whatever is hidden behind the computing."""
        exchange = step.exchange
        return exchange.wire_bytes / step.line_bytes_per_s * self.slowdown + exchange.messages * self.latency_s

    def codec_s(self, step: Step) -> float:
        """Returns the codec's seconds, as measured or by its seconds per byte.

        Raises:
            KeyError: if they were not measured, and the codec is not known.
        """
        if step.codec_s is not None:
            return step.codec_s
        return self.codec_s_per_byte[step.codec] * step.exchange.gradient_bytes

    def exchange_s(self, step: Step) -> float:
        """Predicts by how much the exchange makes a step longer."""
        return max(0.0, self.wire_s(step) - self.overlap * step.compute_s) + self.codec_s(step)

    def step_s(self, step: Step) -> float:
        """Predicts the seconds of a step."""
        return step.compute_s + self.exchange_s(step)


def calibrate(measured: Sequence[Measured], *, overlaps: Sequence[float] = OVERLAPS) -> Model:
    """Fits the model to steps by least squares of relative errors; no parameter is negative.

    Args:
        measured: At least as many steps as there are parameters: slowdown, latency, one for each codec whose seconds
            were not measured.
        overlaps: Those that are tried; the least of the best is taken.

    Raises:
        ValueError: if there are too few steps.
    """
    codecs = sorted({each.step.codec for each in measured if each.step.codec_s is None})
    if len(measured) < 2 + len(codecs):
        raise ValueError(f"{len(measured)} steps do not tell {2 + len(codecs)} parameters")
    best, least = Model(), inf
    for overlap in overlaps:
        model = _fit(measured, codecs, overlap)
        error = float(np.sum(_errors(model, measured) ** 2))
        # A little better is rounding; a model without overlap explains as much with less.
        if error < least * (1 - 1e-6) - 1e-15:
            best, least = model, error
    return best


def _fit(measured: Sequence[Measured], codecs: Sequence[str], overlap: float) -> Model:
    """Fits all else for one overlap: steps whose exchange is hidden say nothing of the wire, so they are told first."""
    rows = np.array([_row(each.step, codecs) for each in measured])
    seconds = np.array([each.step_s for each in measured])
    compute = np.array([each.step.compute_s for each in measured])
    known = np.array([each.step.codec_s or 0.0 for each in measured])
    shown = np.ones(len(measured), dtype=bool)
    solved = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        visible = rows.copy()
        visible[~shown, :2] = 0.0
        target = seconds - compute - known + overlap * compute * shown
        solved = _not_negative(visible / seconds[:, None], target / seconds)
        now = rows[:, :2] @ solved[:2] > overlap * compute
        if np.array_equal(now, shown):
            break
        shown = now
    per_byte = dict(zip(codecs, map(float, solved[2:]), strict=True))
    return Model(slowdown=float(solved[0]), latency_s=float(solved[1]), overlap=overlap, codec_s_per_byte=per_byte)


def _row(step: Step, codecs: Sequence[str]) -> list[float]:
    fitted = [step.exchange.gradient_bytes if step.codec_s is None and step.codec == each else 0.0 for each in codecs]
    return [step.exchange.wire_bytes / step.line_bytes_per_s, float(step.exchange.messages), *fitted]


def _not_negative(rows: Floats, target: Floats) -> Floats:
    """Solves least squares, leaving out, one by one, what would be the most negative."""
    scale = np.abs(rows).max(axis=0)
    kept = [column for column in range(rows.shape[1]) if scale[column] > 0]
    solved = np.zeros(rows.shape[1])
    while kept:
        found = np.linalg.lstsq(rows[:, kept] / scale[kept], target, rcond=None)[0]
        if found.min() >= 0:
            solved[kept] = found / scale[kept]
            break
        kept.pop(int(found.argmin()))
    return solved


def _errors(model: Model, measured: Sequence[Measured]) -> Floats:
    return np.array([model.step_s(each.step) / each.step_s - 1.0 for each in measured])


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How far predictions are from steps that the model was not fitted to.

    Attributes:
        errors: Predicted over measured, less 1, in the order of the steps.
    """

    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the magnitudes."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """Of the magnitudes."""
        return float(np.max(np.abs(self.errors)))


def validate(model: Model, held_back: Sequence[Measured]) -> Validation:
    """Compares predictions with steps that were held back.

    Raises:
        ValueError: if there are none.
    """
    if not held_back:
        raise ValueError("no step was held back")
    return Validation(errors=tuple(map(float, _errors(model, held_back))))


def break_even(dense_s: Callable[[float], float], compressed_s: Callable[[float], float]) -> float:
    """Finds the bandwidth below which compression pays.

    Args:
        dense_s: Seconds of a step without compression, by bytes per second.
        compressed_s: The same with it; what it saves may only shrink with the bandwidth.

    Returns:
        Bytes per second; 0.0 if it never pays, infinity if it always does.
    """

    def saved(logarithm: float) -> float:
        rate = float(np.exp(logarithm))
        return dense_s(rate) - compressed_s(rate)

    low, high = log(_SLOWEST), log(_FASTEST)
    if saved(low) <= 0:
        return 0.0
    if saved(high) > 0:
        return inf
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if saved(middle) > 0 else (low, middle)
    return float(np.exp(low))
