"""Detects exploding gradients by comparison with the median of earlier norms."""

from collections import deque
from collections.abc import Iterable
from math import isfinite
from statistics import median

REMEMBERED = 64
MIN_NORMS = 20
"""With fewer norms nothing is called exploding: the first steps of a run differ by more than anything later."""


class NormWatch:
    """The gradient norms of the last optimiser steps.

    Norms of skipped steps count too: what lasts longer than half of what is remembered is no explosion any more, and a
    run never skips for ever. Norms of 0 do not: nothing was to be learnt there (all rewards were equal, say), which does
    not make large what comes after it.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        """Restores `norms`, newest last."""
        self._norms = deque(norms, maxlen=REMEMBERED)

    @property
    def norms(self) -> list[float]:
        """The remembered norms, newest last."""
        return list(self._norms)

    def explodes(self, norm: float, factor: float | None) -> bool:
        """Records a norm; returns whether it is more than `factor` times the median. `factor` None: never."""
        if not isfinite(norm) or not norm:
            return False  # a norm that is not finite is skipped by the caller
        exploding = factor is not None and len(self._norms) >= MIN_NORMS and norm > factor * median(self._norms)
        self._norms.append(norm)
        return exploding
