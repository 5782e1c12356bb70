"""Forecasts of a demand for slots, and how wrong they were.

Holt's linear method with a damped trend: level `l`, trend `b` per step, forecast of `h` steps ahead `l + (p + … + p^h) b`.
Sources: Holt, ONR Memorandum 52, 1957; Gardner and McKenzie, Management Science 31(10), 1985.

Each forecast is compared with what came, and so is the naive one, that the demand stays as it is. Errors are those of the
last hour, relative to the demand: the sum of the absolute errors by the sum of the demand (WAPE), which a demand of 0 does
not break.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["Compared", "DemandForecast", "ForecastErrors"]

LEVEL_WEIGHT: Final = 0.5
TREND_WEIGHT: Final = 0.2
DAMPING: Final = 0.98
WINDOW_S: Final = 3600.0
# Forecasts that have to be compared before one is used.
MIN_COMPARED: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastErrors:
    """Relative errors of the forecasts of the last hour: 0.1 is a tenth of the demand.

    Attributes:
        forecast: That of Holt's method.
        naive: That of the forecast that the demand stays as it is.
    """

    forecast: float
    naive: float


class Compared(NamedTuple):
    """A sample, and the absolute errors of the forecast and of the naive one, slots."""

    sample: float = 0.0
    error: float = 0.0
    naive_error: float = 0.0


class DemandForecast:
    """Forecasts one series of samples at equal intervals."""

    def __init__(self, *, horizon_s: float, interval_s: float) -> None:
        """Creates an empty series; forecasts are for `horizon_s` after the latest sample, at least one interval."""
        self._steps = max(1, round(horizon_s / interval_s))
        self._reach = sum(DAMPING**step for step in range(1, self._steps + 1))
        self._level = self._trend = 0.0
        self._count = 0
        # The forecasts that were not compared yet, with the samples at which they were made.
        self._made: deque[tuple[float, float]] = deque(maxlen=self._steps)
        # The samples, and the absolute errors of both forecasts of them.
        self._compared: deque[Compared] = deque(maxlen=max(MIN_COMPARED, round(WINDOW_S / interval_s)))

    def add(self, sample: float) -> Compared | None:
        """Adds a sample, at least 0; returns how it compares with its forecasts, None if none was made."""
        compared = None
        if len(self._made) == self._steps:
            forecast, naive = self._made[0]
            compared = Compared(sample, abs(sample - forecast), abs(sample - naive))
            self._compared.append(compared)
        if not self._count:
            self._level = sample
        else:
            before = self._level
            expected = before + DAMPING * self._trend
            self._level = LEVEL_WEIGHT * sample + (1 - LEVEL_WEIGHT) * expected
            self._trend = TREND_WEIGHT * (self._level - before) + (1 - TREND_WEIGHT) * DAMPING * self._trend
        self._count += 1
        self._made.append((self._next(), sample))
        return compared

    def ahead(self) -> float | None:
        """Returns the forecast; None until enough were compared, or if the naive ones were not worse in the last hour."""
        errors = self.errors()
        return self._next() if errors is not None and errors.forecast < errors.naive else None

    def errors(self) -> ForecastErrors | None:
        """Returns the errors of the last hour; None until enough forecasts were compared, or if there was no demand."""
        total = sum(each.sample for each in self._compared)
        if len(self._compared) < MIN_COMPARED or total <= 0:
            return None
        return ForecastErrors(
            forecast=sum(each.error for each in self._compared) / total,
            naive=sum(each.naive_error for each in self._compared) / total,
        )

    def _next(self) -> float:
        return max(0.0, self._level + self._reach * self._trend)
