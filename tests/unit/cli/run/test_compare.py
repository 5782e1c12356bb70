"""Curves of training runs as rows of bars, on one scale."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2
from fulmen_cli.exits import CommandFailed
from fulmen_cli.run.compare import RunHistory, _save_picture, _sparkline, differing, read_history
from fulmen_cli.run.reproduce import Deviation, first_deviation
from tests.support.cli.run_events import RUNNING, SUCCEEDED, Event, RunService, run, step


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
    assert _sparkline(curve, low=0.0, high=1.0, last_step=last_step) == drawn


def test_a_long_curve_fits_the_width_and_a_flat_one_is_a_line() -> None:
    assert _sparkline([(n, n / 999) for n in range(1000)], low=0.0, high=1.0, last_step=999)[0::59] == "▁█"
    assert _sparkline([(0, 3.0), (1, 3.0)], low=3.0, high=3.0, last_step=1) == "▁▁"


def test_only_what_differs_is_listed_and_what_one_has_not_is_a_dash() -> None:
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == {"b": ("2", "3"), "c": ("–", "4")}


def history(name: str, *steps: dict[str, float]) -> RunHistory:
    return RunHistory(
        run=training_run_pb2.TrainingRun(name=f"projects/default/trainingRuns/{name}"),
        steps=[training_run_pb2.StepMetrics(step=number, values=values) for number, values in enumerate(steps, 1)],
    )


def test_the_curves_become_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "curves.png"
    _save_picture(file, [history("a", {"loss": 2.0}, {"loss": 1.0}), history("b", {"loss": 2.5})])

    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="Neither run"):
        _save_picture(tmp_path / "curves.png", [history("a"), history("b", {"step_seconds": 1.0})])


def test_runs_that_differ_in_times_alone_are_the_same() -> None:
    first = history("a", {"loss": 2.0, "step_seconds": 1.0}, {"loss": 1.0, "step_seconds": 1.0})
    second = history("b", {"loss": 2.0, "step_seconds": 3.0}, {"loss": 1.0, "step_seconds": 2.0})

    assert first_deviation(first, second) is None


def test_the_first_step_that_differs_is_named_also_where_one_run_lacks_it() -> None:
    first = history("a", {"loss": 2.0}, {"loss": 1.0}, {"loss": 0.5})

    assert first_deviation(first, history("b", {"loss": 2.0}, {"loss": 1.5}, {"loss": 0.5})) == Deviation(
        step=2, metric="loss", before=1.0, after=1.5
    )
    assert first_deviation(first, history("b", {"loss": 2.0}, {"loss": 1.0})) == Deviation(
        step=3, metric="loss", before=0.5, after=None
    )


def test_what_is_no_number_twice_is_the_same() -> None:
    assert first_deviation(history("a", {"loss": float("nan")}), history("b", {"loss": float("nan")})) is None
    assert first_deviation(history("a", {"loss": float("nan")}), history("b", {"loss": 1.0})) is not None


async def curve(*events: Event, closes: bool, at: int = 0) -> list[tuple[int, float]]:
    """Reads the history of a run that has these events, and is at a step that none of them has told."""
    service = RunService(events, closes=closes)
    service.run.step = at or service.run.step
    return (await asyncio.wait_for(read_history(service.client, "a"), 5)).curve("loss")


def state(value: int, *, step: int = 0, rollbacks: int = 0) -> Event:
    return Event(run=run(step, state=value, rollbacks=rollbacks))


OLD = (state(RUNNING), step(1, loss=5), step(2, loss=4), step(3, loss=3))


@pytest.mark.parametrize("closes", [True, False])
async def test_a_run_that_ended_and_was_rolled_back_has_the_metrics_of_its_last_branch(closes: bool) -> None:
    ended = state(SUCCEEDED, step=3)
    back = state(RUNNING, step=1, rollbacks=1)
    again = (step(2, loss=2), step(3, loss=1), state(SUCCEEDED, step=3, rollbacks=1))
    assert await curve(*OLD, ended, back, *again, closes=closes) == [(1, 5), (2, 2), (3, 1)]


async def test_a_run_that_goes_on_after_a_rollback_has_no_discarded_metric() -> None:
    back = state(RUNNING, step=1, rollbacks=1)
    assert await curve(*OLD, back, closes=False) == [(1, 5)]
    assert await curve(*OLD, back, step(2, loss=2), closes=False, at=2) == [(1, 5), (2, 2)]


async def test_a_step_that_is_done_again_after_a_crash_counts_once() -> None:
    again = (step(2, loss=2), step(3, loss=1), state(SUCCEEDED, step=3))
    assert await curve(*OLD, *again, closes=True) == [(1, 5), (2, 2), (3, 1)]
