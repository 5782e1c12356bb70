"""The inputs and outputs of a policy: round statistics, proposals and decisions."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen_exchange.registry import load_codecs
from fulmen_exchange.settings import CodecSettings

CodecKey = tuple[str, int]
"""Codec name and bits. Choices with the same key share the codec, its state and its coding cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """A codec with its bits and ratio.

    Attributes:
        codec: Registered name of the codec.
        bits: Bits per element, if the codec has this setting; otherwise 0.
        ratio: Bytes of float32 per byte sent, if the codec has this setting; otherwise None.
    """

    codec: str
    bits: int = 0
    ratio: float | None = None

    @property
    def has_residual(self) -> bool:
        """Whether the codec's state may hold unsent gradient."""
        return self._settings.has_residual

    @property
    def uses_ring(self) -> bool:
        """Whether gradients are summed by a ring all-reduce instead of by shards."""
        return self._settings.uses_ring

    @property
    def key(self) -> CodecKey:
        """The part of the choice that identifies the codec's state."""
        return self.codec, self.bits

    @property
    def text(self) -> str:
        """The choice as shown in a run's history."""
        how = f" with {self.bits} bits" if self.bits else ""
        return self.codec + how + (f" at {self.ratio:.4g}x" if self.ratio is not None else "")

    @property
    def bytes_ratio(self) -> float:
        """Bytes of float32 per byte sent, for any codec; scales and counts are neglected."""
        if self.ratio is not None:
            return self.ratio
        if self.bits:
            return 32 / self.bits
        return self._settings.fixed_ratio

    @property
    def _settings(self) -> type[CodecSettings]:
        settings: type[CodecSettings] = load_codecs()[self.codec].settings
        return settings


PLAIN = CodecChoice(codec="none")
"""Uncompressed gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where the time of a round went: the mean over the ranks, except `compute_s`.

    Attributes:
        compute_s: Forward and backward passes and the optimiser, of the slowest rank.
        codec_s: Encoding, summing and decoding.
        transfer_s: Transfer, including the wait for it.
    """

    compute_s: float
    codec_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Statistics that all ranks have before a round, identical on each.

    Attributes:
        number: Number of the round to decide, from 1. A skipped round is decided again under the same number.
        progress: Completed share of the training, 0 to 1.
        gradient_norms: Norms of the gradients to send, by rank, before clipping.
        captured: phi = |C(x)|^2 / |x|^2 of the last round, where x is gradient plus residual; mean over the ranks. None if
            not measured.
        residual: Norm of the residual over the norm of the gradient in the last round; mean over the ranks. None if not
            measured.
        sparsity: Share of zeros in the last round's gradients; mean over the ranks. None if not measured.
        metric: Reward or validation metric since the last round, higher is better; None if there was none.
        seconds: Times of the last round; None if not measured.
    """

    number: int
    progress: float
    gradient_norms: tuple[float, ...]
    captured: float | None = None
    residual: float | None = None
    sparsity: float | None = None
    metric: float | None = None
    seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one part of a policy proposes for a round.

    Attributes:
        choice: The proposed codec.
        reason: Why, as shown to users.
        flush: Whether the residual should be sent completely in this round.
        events: Texts for the history of the run.
    """

    choice: CodecChoice
    reason: str
    flush: bool = False
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a round does.

    Attributes:
        choice: The codec, if enabled.
        enabled: Whether to compress. If False, the round before has flushed the residual.
        flush: Whether to send the whole residual in this round, through the codec.
        reason: Why, as shown to users.
        events: Texts for the history of the run; empty if nothing changed.
    """

    choice: CodecChoice
    enabled: bool
    flush: bool
    reason: str
    events: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes of float32 per byte to send; 1 if the codec has no ratio."""
        return self.choice.ratio if self.choice.ratio is not None else 1.0
