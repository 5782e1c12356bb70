"""What earlier runs measured of the model and the settings of a run that is to be created."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, Registry
from fulmen_algorithm.runs.creation.rules import RunDraft, parse_settings
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

OF_NO_EFFECT = frozenset(
    {
        "steps", "epochs", "seed", "checkpoint_every", "report_every", "learning_rate", "weight_decay", "schedule",
        "warmup_steps", "max_grad_norm", "explosion_factor", "collapse",
    }
)  # fmt: skip
"""Settings that hardly change how long a step takes."""
MOST_READ = 8
"""Number of runs whose steps are read: runs that were stopped immediately measured nothing."""
SPENT, SECONDS = "spent_", "_seconds"
START = f"{SPENT}start{SECONDS}"
PACKING = "packing_efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What a run measured; see `fulmen.algorithm.v1.MeasuredSteps`. `training_run` is empty if there is none."""

    training_run: str = ""
    steps: int = 0
    step_seconds: float = 0.0
    packing_efficiency: float | None = None


async def measured_steps(
    drafts: Sequence[RunDraft], *, algorithms: Registry, runs: RunRegistry, device: str
) -> list[MeasuredSteps]:
    """Returns what the newest run like each draft measured, for the stages of a training in order.

    Args:
        drafts: The stages.
        algorithms: The algorithms.
        runs: Runs of the service; those that another one runs now are left out.
        device: Kind of device on which the service trains, such as `cuda`.
    """
    first: dict[str, PolicySpec] = {}
    found = []
    for draft in drafts:
        entry = algorithms.get(draft.algorithm)
        model = _model(first.setdefault(draft.policy.name, draft.policy))
        wanted = _settings(entry, draft.settings_json) if entry is not None else None
        like = [] if wanted is None or entry is None else _like(draft, entry, wanted, model, runs, device)
        found.append(await asyncio.to_thread(_newest, like))
    return found


def _like(
    draft: RunDraft,
    algorithm: AlgorithmEntry[Any],
    wanted: Mapping[str, Any],
    model: tuple[str, ...],
    runs: RunRegistry,
    device: str,
) -> list[Entry]:
    """Returns the runs like a draft, newest first."""
    same = (
        runs.entry(run.name)
        for run in runs.newest_first(draft.project)
        if run.algorithm == draft.algorithm
        and run.step
        and run.provenance.get("device", device) == device
        and _model(_first_policy(runs.entry(run.name), runs)) == model
        and _settings(algorithm, run.settings_json) == wanted
    )
    return list(islice((each for each in same if not each.elsewhere and not each.stale), MOST_READ))


def _first_policy(entry: Entry, runs: RunRegistry) -> PolicySpec:
    """Returns the policy with which a training began, of whose stages this is one."""
    name = entry.run.policy.name
    before = (runs.find(stage) for stage in entry.run.stages_before)
    return next((e.run.policy for e in before if e is not None and e.run.policy.name == name), entry.run.policy)


def _model(policy: PolicySpec) -> tuple[str, ...]:
    """Names the model of a policy: its versions all have one shape."""
    match policy.origin:
        case PolicyOrigin.PATH | PolicyOrigin.BASE:
            return policy.origin, policy.source
        case PolicyOrigin.BUILD:
            return policy.origin, policy.name, policy.source
    return "published", policy.name


def _settings(algorithm: AlgorithmEntry[Any], settings_json: str) -> dict[str, Any] | None:
    """Returns the settings that decide how long a step takes; None if they are not, or no longer, valid."""
    try:
        settings = parse_settings(algorithm, settings_json)
    except SettingsInvalid:
        return None
    return {name: value for name, value in settings.model_dump().items() if name not in OF_NO_EFFECT}


def _newest(entries: Sequence[Entry]) -> MeasuredSteps:
    """Returns what the first run measured that has measured anything; reads files."""
    for entry in entries:
        steps = entry.events.steps()
        # A run that was stopped within its first step has spent time and done none.
        last = next((each for each in reversed(steps) if each.step and _spent(each)), None)
        if last is not None:
            shares = [each.values[PACKING] for each in steps if PACKING in each.values]
            return MeasuredSteps(
                training_run=entry.run.name,
                steps=last.step,
                step_seconds=_spent(last) / last.step,
                packing_efficiency=fmean(shares) if shares else None,
            )
    return MeasuredSteps()


def _spent(metrics: StepMetrics) -> float:
    """Returns the wall time since the start of the run, the start itself left out."""
    return sum(
        value
        for name, value in metrics.values.items()
        if name.startswith(SPENT) and name.endswith(SECONDS) and name != START
    )
