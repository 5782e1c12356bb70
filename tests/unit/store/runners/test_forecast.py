"""A forecast follows a trend, is never used where doing nothing is better, and says how wrong it was."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.runners.forecast import MIN_COMPARED, DemandForecast

INTERVAL_S = 15.0
HORIZON_S = 120.0
STEPS = 8
series = st.lists(st.floats(0, 1e6), max_size=400)


def after(samples: Iterable[float]) -> DemandForecast:
    forecast = DemandForecast(horizon_s=HORIZON_S, interval_s=INTERVAL_S)
    for sample in samples:
        forecast.add(sample)
    return forecast


@given(series)
def test_a_forecast_and_its_errors_are_finite_and_not_negative(samples: list[float]) -> None:
    forecast = after(samples)
    ahead, errors = forecast.ahead(), forecast.errors()
    assert ahead is None or 0 <= ahead < math.inf
    assert errors is None or (0 <= errors.forecast < math.inf and 0 <= errors.naive < math.inf)


@given(series)
def test_a_forecast_is_used_only_where_it_was_better_than_none(samples: list[float]) -> None:
    forecast = after(samples)
    errors = forecast.errors()
    assert (forecast.ahead() is not None) == (errors is not None and errors.forecast < errors.naive)


@given(value=st.floats(0.5, 1e6), count=st.integers(0, 300))
def test_a_constant_demand_needs_no_forecast(value: float, count: int) -> None:
    forecast = after([value] * count)
    assert forecast.ahead() is None
    errors = forecast.errors()
    assert (errors is None) == (count < MIN_COMPARED + STEPS)
    assert errors is None or errors.forecast == pytest.approx(0, abs=1e-9)


@given(start=st.floats(0, 1000), slope=st.floats(1, 50), scale=st.sampled_from([1.0, 8.0]))
def test_a_growing_demand_is_seen_ahead(start: float, slope: float, scale: float) -> None:
    samples = [scale * (start + slope * step) for step in range(120)]
    ahead, now, then = after(samples).ahead(), samples[-1], scale * (start + slope * (119 + STEPS))
    assert ahead is not None
    # Damping holds it a little below.
    assert now + 0.7 * (then - now) < ahead < then * 1.01
    # What is measured in other units is forecast alike.
    unscaled = after([sample / scale for sample in samples]).ahead()
    assert unscaled is not None
    assert ahead == pytest.approx(scale * unscaled)


def test_the_error_is_that_of_the_forecasts_that_were_made() -> None:
    forecast = after([])
    made: list[float] = []
    errors, total = 0.0, 0.0
    for step in range(240):
        sample = 100 + 80 * math.sin(step / 12)
        if step >= STEPS:
            errors += abs(sample - made[step - STEPS])
            total += sample
        forecast.add(sample)
        made.append(forecast._next())
    told = forecast.errors()
    assert told is not None
    assert told.forecast == pytest.approx(errors / total)
    # A wave of nineteen minutes is foreseen better than by doing nothing.
    assert told.forecast < told.naive


def test_what_has_no_pattern_gets_no_forecast() -> None:
    samples = [float((step * 7919) % 101) for step in range(240)]
    assert after(samples).ahead() is None
