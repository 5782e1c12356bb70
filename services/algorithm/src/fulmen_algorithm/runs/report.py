"""The report of a run: results by step, time by activity, and one answer before and after training."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fulmen_algorithm.runs.events import Notice, StepMetrics
from fulmen_algorithm.runs.recorder import SECTION_PREFIX
from fulmen_algorithm.runs.run import TrainingRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS_SHOWN = 20
WHOLE_FROM = 1000
VERSIONS_SHOWN = 10
NOTICES_SHOWN = 20
SPENT_PREFIX, SPENT_SUFFIX = "spent_", "_seconds"
_COLUMNS = {
    "reward_mean": "reward",
    "loss": "loss",
    "validation_accuracy": "validation",
    "groups_dropped": "dropped groups",
    "staleness_mean": "staleness",
    "rollouts_per_second": "rollouts/s",
    "tokens_per_second": "tokens/s",
}
_SPENT = {
    "start": "loading and starting",
    "generation_wait": "waiting for rollouts",
    "train": "training",
    "exchange": "exchanging gradients",
    "publish": "publishing",
    "validate": "validation",
    "submit": "submitting rollouts",
    "checkpoint": "writing checkpoints",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Markdown, and a chart (PNG; empty without data)."""

    markdown: str
    curve_png: bytes


def report(
    run: TrainingRun,
    steps: Sequence[StepMetrics],
    notices: Sequence[Notice],
    notes: Mapping[str, Mapping[str, object]],
    versions: Sequence[Mapping[str, object]],
) -> Report:
    """Renders the report of a run, finished or not."""
    parts = [
        _head(run),
        _results(run),
        *_sections(notes),
        _table(steps),
        _time(steps),
        _samples(notes),
        _versions(versions),
        _notices(notices),
        _made_with(run),
    ]
    return Report(markdown="\n\n".join(part for part in parts if part) + "\n", curve_png=curve(steps))


def curve(steps: Sequence[StepMetrics]) -> bytes:
    """Plots reward and validation by step, or the loss of runs without rewards, above a bar of the wall time."""
    rewards = _series(steps, "reward_mean")
    lines = {"reward (training, sampled)": rewards, "accuracy (validation)": _series(steps, "validation_accuracy")}
    if not rewards:
        lines = {"loss": _series(steps, "loss"), "loss (held out)": _series(steps, "validation_loss")}
    lines = {label: points for label, points in lines.items() if points}
    if not lines:
        return b""
    # Imported late: it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spent = _spent(steps)
    figure = Figure(figsize=(7, 5 if spent else 4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(2 if spent else 1, squeeze=False, height_ratios=[5, 1] if spent else [1])[:, 0]
    axes = panels[0]
    for label, points in lines.items():
        marker = "o" if len(points) < ROWS_SHOWN else ""
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker, markersize=4)
    axes.set_xlabel("step")
    if rewards:
        values = [y for points in lines.values() for _, y in points]
        axes.set_ylim(min(-0.02, min(values) * 1.05), max(1.02, max(values) * 1.05))
    axes.grid(alpha=0.3)
    axes.legend()
    if spent:
        _draw_time(panels[1], spent)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_time(axes: "Axes", spent: Mapping[str, float]) -> None:
    """Draws one bar of the run's wall time by activity."""
    total, left = sum(spent.values()), 0.0
    for kind, seconds in spent.items():
        axes.barh(0, seconds, left=left, label=f"{_SPENT.get(kind, kind)} {seconds / total:.0%}")
        left += seconds
    axes.set_xlim(0, total)
    axes.set_yticks([])
    axes.set_xlabel("seconds of wall time")
    axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _series(steps: Sequence[StepMetrics], key: str) -> list[tuple[int, float]]:
    return [(s.step, s.values[key]) for s in steps if key in s.values]


def _head(run: TrainingRun) -> str:
    lines = [f"# Training run {run.run_id}", ""]
    facts = {
        "algorithm": run.algorithm,
        "policy": run.policy.name,
        "state": run.state.value.lower(),
        "steps": f"{run.step} of {run.step_count}",
        "policy version": run.policy_version,
        "model": f"`{run.model_path}`" if run.model_path else "",
        "why it failed": run.failure_message,
    }
    if run.start_time and run.end_time:
        facts["time"] = f"{(run.end_time - run.start_time).total_seconds():.0f} s"
    return "\n".join([*lines, *(f"- {key}: {value}" for key, value in facts.items() if value)])


def _results(run: TrainingRun) -> str:
    if not run.results:
        return ""
    rows = [f"| {key} | {value:.4g} |" for key, value in sorted(run.results.items())]
    return "\n".join(["## Results", "", "| metric | value |", "|---|---|", *rows])


def _sections(notes: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Returns the sections added by the algorithm."""
    own = [note for name, note in notes.items() if name.startswith(SECTION_PREFIX)]
    return [f"## {note['title']}\n\n{note['markdown']}" for note in own]


def _table(steps: Sequence[StepMetrics]) -> str:
    """Renders the first and last step, those with a validation, and others evenly between them."""
    if not steps:
        return ""
    keys = [key for key in _COLUMNS if any(key in s.values for s in steps)]
    stride = max(1, len(steps) // ROWS_SHOWN)
    shown = [s for i, s in enumerate(steps) if i % stride == 0 or s is steps[-1] or "validation_accuracy" in s.values]
    head = " | ".join(["step", *(_COLUMNS[key] for key in keys)])
    rows = [" | ".join([str(s.step), *(_number(s.values.get(key)) for key in keys)]) for s in shown]
    return "\n".join(["## Steps", "", f"| {head} |", "|" + "---|" * (len(keys) + 1), *(f"| {r} |" for r in rows)])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= WHOLE_FROM else f"{value:.3g}"


def _spent(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Returns the wall time in seconds by activity, longest first; the steps carry cumulative sums."""
    spent: dict[str, float] = {}
    for step in steps:
        for key, value in step.values.items():
            if key.startswith(SPENT_PREFIX) and key.endswith(SPENT_SUFFIX):
                spent[key.removeprefix(SPENT_PREFIX).removesuffix(SPENT_SUFFIX)] = value
    return dict(sorted(((kind, seconds) for kind, seconds in spent.items() if seconds), key=lambda item: -item[1]))


def _time(steps: Sequence[StepMetrics]) -> str:
    spent = _spent(steps)
    total = sum(spent.values())
    if not total:
        return ""
    rows = [f"| {_SPENT.get(kind, kind)} | {seconds:.1f} | {seconds / total:.0%} |" for kind, seconds in spent.items()]
    return "\n".join(["## Where the time went", "", "| what | seconds | share |", "|---|---|---|", *rows])


def _made_with(run: TrainingRun) -> str:
    if not run.provenance:
        return ""
    rows = [f"| {key} | `{value}` |" for key, value in sorted(run.provenance.items())]
    again = f"Again: `fulmen run reproduce {run.run_id}`."
    return "\n".join(["## Made with", "", again, "", "| what | which |", "|---|---|", *rows])


def _samples(notes: Mapping[str, Mapping[str, object]]) -> str:
    shown = {when: notes[f"sample_{when}"] for when in ("before", "after") if f"sample_{when}" in notes}
    if not shown:
        return ""
    rows = [
        f"| {when} | {_cell(note['prompt'] or note['task'])} | {_cell(note['answer'])} | {_cell(note['reward'])} |"
        for when, note in shown.items()
    ]
    head = ["## One validation task, before and after", "", "| | prompt | answer | reward |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _cell(value: object) -> str:
    text = " ".join(str(value if value is not None else "none").split()).replace("|", "\\|").replace("`", "'")
    return f"`{text[:300]}`"


def _versions(versions: Sequence[Mapping[str, object]]) -> str:
    if not versions:
        return ""
    rows = [f"| {v['name']} | {v['step']} |" for v in versions[-VERSIONS_SHOWN:]]
    head = [f"## Versions ({len(versions)} published, the last of them)", "", "| version | step |", "|---|---|"]
    return "\n".join([*head, *rows])


def _notices(notices: Sequence[Notice]) -> str:
    if not notices:
        return ""
    return "\n".join(["## What happened", "", *(f"- {n.severity}: {n.message}" for n in notices[-NOTICES_SHOWN:])])
