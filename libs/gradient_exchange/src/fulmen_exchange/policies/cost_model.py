"""A cost model of a training step, by codec and topology: few parameters, fitted to measured steps.

    step = compute + max(0, wire - overlap * compute) + codec
    wire = bytes / line * slowdown + messages * latency

G is the gradient's size as float32, N the number of ranks, k = 1 / ratio the share of G that a rank sends:

| topology | bytes of a rank, each way | messages |
|---|---|---|
| ring all-reduce (Patarasuk and Yuan, 2009) | 2 (N - 1) / N k G | 2 (N - 1) |
| sharded aggregator with a reply as large as a payload | 2 k G (N - 1) / N | 2 |
| sharded aggregator that replies with the union | (1 + N^0.62) k G (N - 1) / N, the reply at most G / 2 | 2 |
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
"""Bounds of the search for a break-even bandwidth, in bytes per second."""

Floats = NDArray[np.float64]


class Topology(StrEnum):
    """How payloads travel between ranks."""

    RING = "ring"
    SHARDED = "sharded"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of all gradients.

    Attributes:
        topology: How payloads travel.
        world_size: N.
        gradient_bytes: G, as float32.
        ratio: Bytes of float32 per byte that a rank sends.
        union: Whether a sharded aggregator replies with the union of all payloads instead of its largest elements; in bfloat16 where that is less.
    """

    topology: Topology
    world_size: int
    gradient_bytes: float
    ratio: float = 1.0
    union: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes through a rank's line, in the busier direction, or in both if they alternate."""
        ranks, sent = self.world_size, self.gradient_bytes / self.ratio
        match self.topology:
            case Topology.RING:
                return 2 * (ranks - 1) / ranks * sent
            case Topology.GATHER:
                return (ranks - 1) * sent
            case Topology.SHARDED:
                back = min(sent * ranks**UNION_EXPONENT, self.gradient_bytes / 2) if self.union else sent
                return (sent + back) * (ranks - 1) / ranks

    @property
    def messages(self) -> int:
        """Number of messages that wait for each other."""
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
    """A training step, without its duration.

    Attributes:
        exchange: The exchange of its gradients.
        compute_s: Seconds of everything else.
        codec: Name of the codec; its seconds per byte are fitted if `codec_s` is None.
        codec_s: Measured seconds of encoding, summing and decoding; None if unknown.
        line_bytes_per_s: Nominal line rate; 1 if unknown, so that the slowdown is seconds per byte.
    """

    exchange: Exchange
    compute_s: float
    codec: str = "none"
    codec_s: float | None = 0.0
    line_bytes_per_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step and its measured duration."""

    step: Step
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Parameters of the machines and the network.

    Attributes:
        slowdown: Factor by which a byte takes longer than the nominal line rate says.
        latency_s: Seconds per message.
        overlap: Share of computing during which gradients are already being sent.
        codec_s_per_byte: Seconds per byte of G, by codec.
    """

    slowdown: float = 1.0
    latency_s: float = 0.0
    overlap: float = 0.0
    codec_s_per_byte: Mapping[str, float] = field(default_factory=dict)

    def wire_s(self, step: Step) -> float:
        """Predicts the seconds on the wire, including those hidden by computing."""
        exchange = step.exchange
        return exchange.wire_bytes / step.line_bytes_per_s * self.slowdown + exchange.messages * self.latency_s

    def codec_s(self, step: Step) -> float:
        """Returns the codec's seconds, measured or predicted.

        Raises:
            KeyError: if they were not measured and the codec is unknown.
        """
        if step.codec_s is not None:
            return step.codec_s
        return self.codec_s_per_byte[step.codec] * step.exchange.gradient_bytes

    def exchange_s(self, step: Step) -> float:
        """Predicts by how much the exchange lengthens a step."""
        return max(0.0, self.wire_s(step) - self.overlap * step.compute_s) + self.codec_s(step)

    def step_s(self, step: Step) -> float:
        """Predicts the seconds of a step."""
        return step.compute_s + self.exchange_s(step)


def calibrate(measured: Sequence[Measured], *, overlaps: Sequence[float] = OVERLAPS) -> Model:
    """Fits the model by least squares of relative errors; no parameter is negative.

    Args:
        measured: At least as many steps as parameters: slowdown, latency, and one per codec without measured seconds.
        overlaps: Values to try; the smallest of the best is used.

    Raises:
        ValueError: if there are too few steps.
    """
    codecs = sorted({each.step.codec for each in measured if each.step.codec_s is None})
    if len(measured) < 2 + len(codecs):
        raise ValueError(f"{len(measured)} steps are too few to fit {2 + len(codecs)} parameters")
    best, least = Model(), inf
    for overlap in overlaps:
        model = _fit(measured, codecs, overlap)
        error = float(np.sum(_errors(model, measured) ** 2))
        # Ignore gains within rounding: prefer the model with less overlap.
        if error < least * (1 - 1e-6) - 1e-15:
            best, least = model, error
    return best


def _fit(measured: Sequence[Measured], codecs: Sequence[str], overlap: float) -> Model:
    """Fits all other parameters for one overlap; steps whose exchange is hidden contain no information about the
    network."""
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
    """Solves least squares, dropping the most negative column until none is negative."""
    scale = np.abs(rows).max(axis=0)
    columns = [column for column in range(rows.shape[1]) if scale[column] > 0]
    solved = np.zeros(rows.shape[1])
    while columns:
        found = np.linalg.lstsq(rows[:, columns] / scale[columns], target, rcond=None)[0]
        if found.min() >= 0:
            solved[columns] = found / scale[columns]
            break
        columns.pop(int(found.argmin()))
    return solved


def _errors(model: Model, measured: Sequence[Measured]) -> Floats:
    return np.array([model.step_s(each.step) / each.step_s - 1.0 for each in measured])


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Prediction errors on steps that the model was not fitted to.

    Attributes:
        errors: Predicted over measured, minus 1, in the order of the steps.
    """

    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median absolute error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """The largest absolute error."""
        return float(np.max(np.abs(self.errors)))


def validate(model: Model, held_back: Sequence[Measured]) -> Validation:
    """Compares predictions with held-out steps.

    Raises:
        ValueError: if there are none.
    """
    if not held_back:
        raise ValueError("no held-out steps")
    return Validation(errors=tuple(map(float, _errors(model, held_back))))


def break_even(dense_s: Callable[[float], float], compressed_s: Callable[[float], float]) -> float:
    """Returns the bandwidth below which compression pays off.

    Args:
        dense_s: Seconds of a step without compression, by bytes per second.
        compressed_s: The same with compression; its savings must not grow with the bandwidth.

    Returns:
        Bytes per second; 0.0 if it never pays off, infinity if it always does.
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
