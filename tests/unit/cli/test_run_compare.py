"""Curves of training runs as rows of bars, on one scale."""

from __future__ import annotations

import pytest

from fulmen.cli.run_compare import _differing, _drawn


@pytest.mark.parametrize(
    ("curve", "last_step", "drawn"),
    [
        ([(0, 0.0), (1, 0.5), (2, 1.0)], 2, "▁▅█"),
        ([(0, 0.0), (2, 1.0)], 2, "▁·█"),
        ([(1, 1.0), (2, float("nan"))], 2, "·█·"),
        ([], 2, "···"),
    ],
)
def test_each_column_is_the_mean_of_its_steps_and_a_dot_where_nothing_was_measured(
    curve: list[tuple[int, float]], last_step: int, drawn: str
) -> None:
    assert _drawn(curve, low=0.0, high=1.0, last_step=last_step) == drawn


def test_a_long_curve_fits_the_width_and_a_flat_one_is_drawn() -> None:
    assert _drawn([(n, n / 999) for n in range(1000)], low=0.0, high=1.0, last_step=999)[0::59] == "▁█"
    assert _drawn([(0, 3.0), (1, 3.0)], low=3.0, high=3.0, last_step=1) == "▁▁"


def test_only_what_differs_is_listed_and_what_one_has_not_is_a_dash() -> None:
    assert _differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == {"b": ("2", "3"), "c": ("–", "4")}
