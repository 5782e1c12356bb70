"""How notebooks show a training run: its state and the curves of its steps, which grow while it is iterated over."""

from __future__ import annotations

import html
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from fulmen.client.runs import Step

__all__ = ["LiveChart", "chart_html"]

INTERVAL_S: Final = 1.0
CURVES: Final = (("reward", "reward"), ("validation", "validation"), ("loss", "loss"))
SIZE_INCHES: Final = (4.0, 2.2)


def chart_html(title: str, state: str, steps: Sequence[Step]) -> str:
    """Returns HTML with a run's last figures, and its curves as SVG if matplotlib is installed."""
    curves = {label: _points(steps, attribute) for attribute, label in CURVES}
    curves = {label: points for label, points in curves.items() if points}
    last = ", ".join(f"{label} {points[-1][1]:.3g}" for label, points in curves.items())
    at = f", step {steps[-1].number}" if steps else ""
    head = f"<b>{html.escape(title)}</b>: {html.escape(state)}{at}{': ' if last else ''}{html.escape(last)}"
    return f"<div>{head}<br>{_svg(curves)}</div>"


def _points(steps: Sequence[Step], attribute: str) -> list[tuple[int, float]]:
    found = ((each.number, getattr(each, attribute)) for each in steps)
    return sorted((number, value) for number, value in found if value is not None)


def _svg(curves: dict[str, list[tuple[int, float]]]) -> str:
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ImportError:
        return 'For curves: <code>pip install "fulmen[notebook]"</code>'
    if not curves:
        return ""
    width, height = SIZE_INCHES
    figure = Figure(figsize=(width * len(curves), height), layout="constrained")
    for axes, (label, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "")
        axes.set_title(label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    # The text before belongs to a separate file.
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


class LiveChart:
    """A display in a notebook that is updated while a run continues."""

    def __init__(self, display: Callable[..., Any]) -> None:
        """Shows nothing yet.

        Args:
            display: `IPython.display.display`.
        """
        self._display = display
        self._handle: Any = None
        self._shown_at = -INTERVAL_S

    @classmethod
    def in_notebook(cls) -> LiveChart | None:
        """Returns one in a notebook; None elsewhere."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None or not hasattr(shell, "kernel"):
            return None
        from IPython.display import display

        return cls(display)

    def show(self, draw: Callable[[], str]) -> None:
        """Replaces the chart, at most once per second, by what `draw` returns as HTML."""
        if time.monotonic() - self._shown_at < INTERVAL_S:
            return
        self.show_now(draw)

    def show_now(self, draw: Callable[[], str]) -> None:
        """Replaces the chart by what `draw` returns as HTML."""
        self._shown_at = time.monotonic()
        shown = {"text/html": draw(), "text/plain": ""}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
