"""What a policy is told of a round, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen_exchange.registry import load_codecs
from fulmen_exchange.settings import CodecSettings

CodecKey = tuple[str, int]
"""What candidates have in common that share a codec with its states, and the cost of coding: the codec's name, and bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """A choice to send gradients.

    Attributes:
        codec: Registered name of the codec.
        bits: Of its elements, where that is a proposal; else 0.
        ratio: Bytes of float32 for each byte that is sent, where that is a proposal; else None.
    """

    codec: str
    bits: int = 0
    ratio: float | None = None

    @property
    def has_residual(self) -> bool:
        """Whether something may be left in the state when this gives choice to another choice."""
        return self._settings.has_residual

    @property
    def uses_ring(self) -> bool:
        """Whether its sums go round in a ring, and not through shards."""
        return self._settings.uses_ring

    @property
    def key(self) -> CodecKey:
        """What it has in common with candidates that differ by the ratio alone."""
        return self.codec, self.bits

    @property
    def text(self) -> str:
        """Names it for a person."""
        how = f" with {self.bits} bits" if self.bits else ""
        return self.codec + how + (f" at {self.ratio:.4g}x" if self.ratio is not None else "")

    @property
    def bytes_ratio(self) -> float:
        """Bytes of float32 for each byte that is sent, of any choice; what scales and counts cost is neglected."""
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
"""Gradients as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where the time of a round went: the mean over its ranks, but that of the slowest for `compute_s`.

    Attributes:
        compute_s: Forward and backward passes, and the optimiser.
        codec_s: Encoding, summing and decoding.
        transfer_s: On the wire, and waiting for it.
    """

    compute_s: float
    codec_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """What all ranks know before a round: the caller has gathered it, so it is the same on each.

    Attributes:
        number: Of the round that is to be decided on, from 1; a round that was skipped is decided on again.
        progress: How much of the training is done: 0 to 1.
        gradient_norms: Of the gradients that are to be sent, by rank, before clipping.
        captured: phi = |C(x)|^2 / |x|^2 of the last round: x is what could have been sent, what was kept back included;
            the mean over the ranks. None where it was not measured.
        residual: Norm of what was kept back in the last round over the norm of what had come in; the mean over the
            ranks. None where it was not measured.
        sparsity: Share of elements that were 0 in the last round's gradients; the mean over the ranks. None where it
            was not measured.
        metric: Reward or validation metric that came since the last round, the higher the better; None if none did.
        seconds: Of the last round; None where it was not measured.
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
    """What one part of a policy wants.

    Attributes:
        choice: The choice to send.
        reason: Why, for a person.
        flush: Whether all that was kept back should be sent now.
        events: What is to be told in the history of the run.
    """

    choice: CodecChoice
    reason: str
    flush: bool = False
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a round does.

    Attributes:
        choice: The choice to send, where it is enabled.
        enabled: False if gradients are to be sent as they are. The round before has then sent all that was kept back.
        flush: Whether all that was kept back is to be sent in this round, through the choice's codec.
        reason: Why, for a person.
        events: Texts for the history of the run; none if nothing has changed.
    """

    choice: CodecChoice
    enabled: bool
    flush: bool
    reason: str
    events: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes of float32 for each byte that is to be sent, where the codec has a proposal; else 1."""
        return self.choice.ratio if self.choice.ratio is not None else 1.0
