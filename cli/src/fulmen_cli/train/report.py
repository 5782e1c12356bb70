"""Writes the report of a training: `report.md`, `curve.png`, and the lines printed at the end."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2

__all__ = [
    "Sample",
    "SamplePair",
    "StageOutcome",
    "accuracy_line",
    "compared_stage",
    "print_summary",
    "sample_before_and_after",
    "save_report",
    "trained_model",
]

_HEADING: Final = re.compile(r"^(#+) ", re.MULTILINE)
BEFORE = "validation_accuracy_before"
AFTER = "validation_accuracy_after"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """A finished stage: its run, duration in seconds, the service's report, and which rollout failed first, if one did."""

    run: training_run_pb2.TrainingRun
    seconds: float
    markdown: str
    curve_png: bytes
    failure: str = ""


def compared_stage(outcomes: list[StageOutcome]) -> StageOutcome | None:
    """Returns the last stage with validation before and after; None if there is none."""
    return next((each for each in reversed(outcomes) if {BEFORE, AFTER} <= set(each.run.results)), None)


def accuracy_line(outcomes: list[StageOutcome]) -> str:
    """Returns the machine-readable last line; empty if no stage was validated.

    Of several stages that did, the last one counts: the figure is what the reinforcement learning itself has added.
    """
    for outcome in reversed(outcomes):
        results = outcome.run.results
        if BEFORE in results and AFTER in results:
            return f"validation accuracy {results[BEFORE]:.2f} -> {results[AFTER]:.2f}"
        for key in ("test_pass_at_1", "validation_pass_at_1"):
            if key in results:
                low, high = results[f"{key}_low"], results[f"{key}_high"]
                return f"{key.partition('_')[0]} pass@1 {results[key]:.3f} ({low:.3f} to {high:.3f})"
    return ""


def print_summary(
    screen: Console, outcomes: list[StageOutcome], sample: SamplePair | None, folder: Path, *, has_store: bool
) -> None:
    """Prints the table, the sample and the paths; `has_store` is whether traces can be read later."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "steps", "time", "validation before", "after", "policy version"):
        table.add_column(column, justify="left" if column in ("stage", "policy version") else "right")
    for outcome in outcomes:
        table.add_row(*(Text(cell) for cell in _row(outcome)))
    screen.print()
    screen.print(table)
    for outcome in outcomes:
        if outcome.failure:
            screen.print(Text(f"{outcome.run.algorithm}: {outcome.failure}"))
    if sample is not None:
        screen.print()
        screen.print(Text(f"One validation task, before and after: {sample.before.task}"))
        screen.print(Text(f"  before: {_outcome(sample.before)}"))
        screen.print(Text(f"  after:  {_outcome(sample.after)}"))
        if has_store:
            screen.print(Text(f"  see them: fulmen trace {sample.after.rollout}", style="dim"))
    screen.print()
    screen.print(Text(f"trained model: {trained_model(outcomes) or '(none)'}"))
    screen.print(Text(f"report:        {folder / 'report.md'}"))


def save_report(folder: Path, title: str, outcomes: list[StageOutcome], sample: SamplePair | None) -> None:
    """Writes `report.md` and the curves; `curve.png` is the curve of the last stage that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", _summary(outcomes)]
    if sample is not None:
        parts.append(_sample_section(sample))
    last_curve = b""
    for number, outcome in enumerate(outcomes, start=1):
        body = _HEADING.sub(r"##\1 ", outcome.markdown.strip())
        parts.append(f"## Stage {number}: {outcome.run.algorithm}\n\n{body}")
        if outcome.curve_png:
            last_curve = outcome.curve_png
            curve = f"{number}-{outcome.run.algorithm}.png"
            (folder / curve).write_bytes(outcome.curve_png)
            parts.append(f"![The curve of stage {number}]({curve})")
    if last_curve:
        (folder / "curve.png").write_bytes(last_curve)
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _summary(outcomes: list[StageOutcome]) -> str:
    lines = ["| stage | steps | time | validation before | after | policy version |", "|---|--:|--:|--:|--:|---|"]
    lines += ["| " + " | ".join(_row(outcome)) + " |" for outcome in outcomes]
    accuracy = accuracy_line(outcomes)
    if model := trained_model(outcomes):
        lines += ["", f"Trained model: `{model}`"]
    return "\n".join(lines + (["", accuracy] if accuracy else []))


def trained_model(outcomes: list[StageOutcome]) -> str:
    """Returns the model directory of the last stage that trained one; empty if none did."""
    return next((outcome.run.model_path for outcome in reversed(outcomes) if outcome.run.model_path), "")


def _sample_section(sample: SamplePair) -> str:
    return (
        "## One validation task, before and after\n\n"
        f"Task: `{sample.before.task}`\n\n"
        f"* before (`{sample.before.rollout}`): {_outcome(sample.before)}\n"
        f"* after (`{sample.after.rollout}`): {_outcome(sample.after)}"
    )


def _row(outcome: StageOutcome) -> tuple[str, ...]:
    run = outcome.run
    before, after = (f"{run.results[key]:.2f}" if key in run.results else "" for key in (BEFORE, AFTER))
    return (run.algorithm, str(run.step), f"{outcome.seconds:.1f} s", before, after, run.policy_version)


def _outcome(sample: Sample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    return f"{sample.outcome or '(nothing)'}  ({reward})"


PAGE_SIZE: Final = 1000
MAX_PAGES: Final = 50
MAX_COMPARED: Final = 24
MAX_TEXT: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout: input, outcome and reward, None without one."""

    rollout: str
    task: str
    outcome: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePair:
    """The same task, before and after."""

    before: Sample
    after: Sample


async def sample_before_and_after(client: Services, training_run: str) -> SamplePair | None:
    """Picks the validation task whose reward grew most; None without two validations.

    Raises:
        FulmenError: if the store refuses or cannot be reached.
    """
    by_task: dict[str, list[rollout_pb2.Rollout]] = {}
    for rollout in await _validation_rollouts(client, training_run):
        # A validation group is `validation/{policy version}/{task}`: the last part is the task.
        by_task.setdefault(rollout.group_id.rpartition("/")[2], []).append(rollout)
    twice = [rollouts for rollouts in by_task.values() if len(rollouts) > 1]
    pairs = await asyncio.gather(*(_pair(client, rollouts) for rollouts in twice[:MAX_COMPARED]))
    return max(pairs, key=_growth, default=None)


async def _validation_rollouts(client: Services, training_run: str) -> list[rollout_pb2.Rollout]:
    found: list[rollout_pb2.Rollout] = []
    request = rollout_service_pb2.ListRolloutsRequest(training_run=training_run, page_size=PAGE_SIZE)
    for _ in range(MAX_PAGES):
        page = await client.rollouts.ListRollouts(request)
        found += [each for each in page.rollouts if each.mode == rollout_pb2.ROLLOUT_MODE_VALIDATION]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    return found


async def _pair(client: Services, rollouts: list[rollout_pb2.Rollout]) -> SamplePair:
    ordered = sorted(rollouts, key=lambda each: each.create_time.ToNanoseconds())
    before, after = await asyncio.gather(_sample(client, ordered[0].name), _sample(client, ordered[-1].name))
    return SamplePair(before=before, after=after)


async def _sample(client: Services, name: str) -> Sample:
    answer = await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
    rollout = answer.rollout
    attempt = rollout.attempts[-1] if rollout.attempts else None
    given = [] if attempt is None else attempt.rewards
    rewards = [each.value for each in given if not each.HasField("step") and not each.span_id]
    return Sample(
        rollout=name,
        task=_readable(rollout.input),
        outcome="" if attempt is None else _readable(attempt.output) or attempt.failure_message,
        reward=rewards[0] if rewards else None,
    )


def _growth(pair: SamplePair) -> float:
    if pair.before.reward is None or pair.after.reward is None:
        return float("-inf")
    return pair.after.reward - pair.before.reward


def _readable(content: bytes) -> str:
    text = content.decode("utf-8", errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        pass
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
