"""Curves of training runs as rows of bars, on one scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.cli.exits import CommandFailed
from fulmen.cli.run_compare import Told, _drawn, _save_picture, differing
from fulmen.cli.run_reproduce import Deviation, first_deviation


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
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == {"b": ("2", "3"), "c": ("–", "4")}


def told(name: str, *steps: dict[str, float]) -> Told:
    return Told(
        run=training_run_pb2.TrainingRun(name=f"trainingRuns/{name}"),
        steps=[training_run_pb2.StepMetrics(step=number, values=values) for number, values in enumerate(steps, 1)],
    )


def test_the_curves_become_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "curves.png"
    _save_picture(file, [told("a", {"loss": 2.0}, {"loss": 1.0}), told("b", {"loss": 2.5})])

    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="Neither run"):
        _save_picture(tmp_path / "curves.png", [told("a"), told("b", {"step_seconds": 1.0})])


def test_runs_that_differ_in_times_alone_are_the_same() -> None:
    first = told("a", {"loss": 2.0, "step_seconds": 1.0}, {"loss": 1.0, "step_seconds": 1.0})
    second = told("b", {"loss": 2.0, "step_seconds": 3.0}, {"loss": 1.0, "step_seconds": 2.0})

    assert first_deviation(first, second) is None


def test_the_first_step_that_differs_is_named_also_where_one_run_lacks_it() -> None:
    first = told("a", {"loss": 2.0}, {"loss": 1.0}, {"loss": 0.5})

    assert first_deviation(first, told("b", {"loss": 2.0}, {"loss": 1.5}, {"loss": 0.5})) == Deviation(
        step=2, figure="loss", before=1.0, after=1.5
    )
    assert first_deviation(first, told("b", {"loss": 2.0}, {"loss": 1.0})) == Deviation(
        step=3, figure="loss", before=0.5, after=None
    )
