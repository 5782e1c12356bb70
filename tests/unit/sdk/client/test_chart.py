"""A notebook shows a run's curves, and replaces them as the run goes on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.client import chart
from fulmen.client.chart import LiveChart, chart_html
from fulmen.client.runs import Step


def step(number: int, **values: float) -> Step:
    return Step(training_run_pb2.StepMetrics(step=number, values=values))


def test_the_state_and_the_last_figures_stand_over_one_curve_each() -> None:
    shown = chart_html(
        "demo <1>", "running", [step(1, reward_mean=0.25), step(2, reward_mean=0.5, validation_accuracy=0.75)]
    )

    assert "<b>demo &lt;1&gt;</b>: running, step 2: reward 0.5, validation 0.75" in shown
    assert shown.count("<svg") == 1


def test_without_matplotlib_the_figures_are_shown_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    shown = chart_html("demo", "running", [step(1, reward_mean=0.25)])

    assert "reward 0.25" in shown
    assert "fulmen[notebook]" in shown


def test_a_run_without_steps_is_its_state() -> None:
    assert "<b>demo</b>: pending" in chart_html("demo", "pending", [])


class Display:
    """IPython's `display`, which remembers what it was given."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, data: dict[str, str], **_: Any) -> Display:
        self.shown.append(data["text/html"])
        return self

    def update(self, data: dict[str, str], **_: Any) -> None:
        """Replaces what was shown."""
        self.shown.append(data["text/html"])


def test_a_chart_is_replaced_at_most_once_per_interval_but_always_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 0.5, 1.0, 1.0, 1.1])
    monkeypatch.setattr(chart, "time", SimpleNamespace(monotonic=lambda: next(now)))
    display = Display()
    live = LiveChart(display)

    for text in ("first", "too soon", "second"):
        live.show(lambda text=text: text)  # type: ignore[misc]
    live.show_now(lambda: "end")

    assert display.shown == ["first", "second", "end"]


def test_there_is_a_chart_in_a_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert LiveChart.in_notebook() is None
    shell = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert LiveChart.in_notebook() is None
    shell.kernel = object()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=Display()))
    assert LiveChart.in_notebook() is not None
