"""Validates the stages of a training before they are created: all problems of all stages are reported together."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from fulmen.errors import SettingsInvalid, Violation
from fulmen.ids import training_run_name, uuid7
from fulmen_algorithm.runs.creation.rules import (
    CreationRules,
    KnowsRun,
    RunDraft,
    checked_settings,
    checked_with_resources,
    digest,
)
from fulmen_algorithm.runs.ports import GpuPlan, ResourceStore
from fulmen_algorithm.runs.run import TrainingRun

MAX_STAGES = 16


def _knows_none(name: str) -> bool:
    return False


async def checked_runs(
    drafts: Sequence[RunDraft],
    *,
    rules: CreationRules,
    resources: ResourceStore,
    now: datetime,
    knows_run: KnowsRun = _knows_none,
) -> list[TrainingRun]:
    """Checks the drafts of one run, or of the stages of a training in order, and all resources that they name.

    Args:
        drafts: The runs.
        rules: Rules of the service.
        resources: Resources of the project of the first.
        now: Creation time of the runs.
        knows_run: Returns whether a run exists, including runs without rollouts.

    Raises:
        SettingsInvalid: with every problem of every stage, bad lines of data sets included.
        ResourceNotFound: if an input is unknown.
    """
    names = [draft.name or training_run_name(draft.project, str(uuid7())) for draft in drafts]
    runs: list[TrainingRun] = []
    violations = _stage_problems(drafts, names)
    trained: set[str] = set()
    for index, draft in enumerate(drafts[:MAX_STAGES]):
        if draft.project != drafts[0].project:
            continue
        settings, found = await checked_with_resources(draft, rules, resources, knows_run, trained)
        prefix = f"next_stages[{index - 1}]." if index else ""
        violations += [replace(each, field=prefix + each.field) for each in found]
        entry = rules.registry.get(draft.algorithm)
        if entry is None or entry.trains:
            trained.add(draft.policy.name)
        if settings is not None:
            runs.append(
                TrainingRun(
                    name=names[index],
                    display_name=draft.display_name,
                    tags=draft.tags,
                    pause_at_step=draft.pause_at_step,
                    algorithm=draft.algorithm,
                    settings_json=settings.model_dump_json(),
                    policy=draft.policy,
                    inputs=dict(draft.inputs),
                    create_time=now,
                    step_count=settings.steps,
                    request_id=draft.request_id,
                    request_digest=digest(*drafts[index:]),
                    stages=tuple(names) if len(names) > 1 else (),
                )
            )
    if violations or len(runs) < len(drafts):
        raise SettingsInvalid("The training run is not valid.", violations=violations)
    return runs


async def gpu_plans(drafts: Sequence[RunDraft], rules: CreationRules) -> list[GpuPlan]:
    """Plans where one run is, or the stages of a training in order; only their algorithms and settings are read."""
    plans = []
    for draft in drafts[:MAX_STAGES]:
        settings, violations = checked_settings(draft, rules.registry)
        if settings is None:
            plans.append(GpuPlan(problems=[f"{each.field}: {each.description}" for each in violations]))
        else:
            trains = rules.registry[draft.algorithm].trains
            both = [await plan(settings, trains) for plan in (rules.gpu_plan, rules.cluster_plan)]
            problems = [problem for plan in both for problem in plan.problems]
            text = " ".join(plan.text for plan in both if plan.text)
            plans.append(GpuPlan(text="" if problems else text, problems=problems))
    return plans


def _stage_problems(drafts: Sequence[RunDraft], names: Sequence[str]) -> list[Violation]:
    """Returns the problems of stages as a whole."""
    found = []
    if len(names) > MAX_STAGES:
        text = f"has {len(names) - 1} entries, allowed are {MAX_STAGES - 1}"
        found.append(Violation(field="next_stages", description=text))
    for index, draft in enumerate(drafts[1:MAX_STAGES]):
        if names[index + 1] in names[: index + 1]:
            found.append(Violation(field=f"next_stages[{index}].name", description="is the name of an earlier stage"))
        if draft.project != drafts[0].project:
            text = f"must be {drafts[0].project}, the project of the run"
            found.append(Violation(field=f"next_stages[{index}].project", description=text))
    return found
