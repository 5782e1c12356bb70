"""Shows the progress of a training run: a live table on a terminal, one line per step elsewhere, or every event as
JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import training_run_pb2
from fulmen_cli.output import as_dict, print_json_line

__all__ = ["RunProgress"]

# The figures of a step that people want to see, with how each is written; those that a run does not measure are left
# out. The names are the contract's (StepMetrics.values).
_FIGURES: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("loss", "loss", lambda value: f"{value:.3f}"),
    ("reward_mean", "reward", lambda value: f"{value:.3f}"),
    ("validation_accuracy", "validation", lambda value: f"{value:.2f}"),
    ("validation_pass_at_1", "pass@1", lambda value: f"{value:.2f}"),
    ("test_pass_at_1", "pass@1 (test)", lambda value: f"{value:.2f}"),
    ("tasks_done", "tasks", lambda value: f"{value:.0f}"),
    ("candidates", "prompts", lambda value: f"{value:.0f}"),
    ("calls", "calls", lambda value: f"{value:.0f}"),
    ("rollouts_per_second", "rollouts/s", lambda value: f"{value:.1f}"),
    ("tokens_per_second", "tokens/s", lambda value: f"{value:.0f}"),
    ("staleness_mean", "staleness", lambda value: f"{value:.2f}"),
    ("eta_seconds", "ETA", lambda value: _duration(value)),
)
# Not measured at every step, and still true at the next.
_LASTING: Final = frozenset({"validation_accuracy"})
PLAIN_INTERVAL_S: Final = 1.0


class RunProgress:
    """Shows one run; use as a context manager."""

    def __init__(
        self, screen: Console, title: str, *, step_count: int, as_json: bool = False, lines_only: bool = False
    ) -> None:
        """Prepares the display.

        Args:
            screen: where to print.
            title: what runs, such as `grpo`.
            step_count: steps planned; 0 if not known.
            as_json: print each event as one line of JSON, and nothing else.
            lines_only: print lines on a terminal, too: something else, such as a debugger, writes there.
        """
        self._screen = screen
        self._title = title
        self._as_json = as_json
        self._lines_only = lines_only
        self._is_interrupted = False
        self._figures: dict[str, float] = {}
        self._printed_at = -PLAIN_INTERVAL_S
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=screen
        )
        self._task = self._bar.add_task(title, total=step_count or None)
        self._total = step_count
        self._live = Live(console=screen, refresh_per_second=4, transient=False) if self._is_live else None

    @property
    def _is_live(self) -> bool:
        return self._screen.is_terminal and not (self._as_json or self._lines_only)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()

    def show(self, event: training_run_pb2.TrainingRunEvent) -> None:
        """Takes in one event."""
        self._is_interrupted = False
        if self._as_json:
            print_json_line(as_dict(event))
            return
        match event.WhichOneof("event"):
            case "step":
                self._step(event.step)
            case "notice":
                self.say(event.notice.message, severity=event.notice.severity)
            case "run":
                self._run(event.run)

    def say(self, message: str, *, severity: str = "info") -> None:
        """Prints a message for a person above the display."""
        if self._as_json:
            return
        style = {"warning": "yellow", "error": "bold red"}.get(severity, "dim")
        self._screen.print(Text(f"{self._title}: {message}", style=style))

    def interrupted(self, message: str) -> None:
        """Reports once that the service cannot be reached, until it answers again."""
        if not self._is_interrupted:
            self.say(message, severity="warning")
        self._is_interrupted = True

    def _run(self, run: training_run_pb2.TrainingRun) -> None:
        if run.step_count and run.step_count != self._total:
            self._total = run.step_count
            self._bar.update(self._task, total=run.step_count)
        self._draw()

    def _step(self, step: training_run_pb2.StepMetrics) -> None:
        lasting = {name: value for name, value in self._figures.items() if name in _LASTING}
        self._figures = {**lasting, **step.values}
        self._bar.update(self._task, completed=step.step)
        if self._live is not None:
            self._draw()
            return
        now = time.monotonic()
        last = bool(self._total) and step.step >= self._total
        if last or step.step == 0 or now - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = now
            words = [f"{label} {text}" for label, text in self._texts()]
            total = f"/{self._total}" if self._total else ""
            self._screen.print(f"{self._title}: step {step.step}{total}  " + "  ".join(words))

    def _texts(self) -> list[tuple[str, str]]:
        return [(label, write(self._figures[name])) for name, label, write in _FIGURES if name in self._figures]

    def _draw(self) -> None:
        if self._live is None:
            return
        table = Table(box=None, pad_edge=False, header_style="dim")
        texts = self._texts()
        for label, _ in texts:
            table.add_column(label, justify="right", min_width=9)
        table.add_row(*(text for _, text in texts))
        self._live.update(Group(self._bar, table) if texts else self._bar)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
