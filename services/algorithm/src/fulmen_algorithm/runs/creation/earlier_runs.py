"""Checks the runs that settings name, whose rollouts a run reads."""

from collections.abc import Callable

from fulmen.errors import Violation
from fulmen_algorithm.runs.algorithm import RunSettings
from fulmen_algorithm.runs.ports import ResourceStore


async def earlier_problems(
    project: str, settings: RunSettings, resources: ResourceStore, knows_run: Callable[[str], bool]
) -> list[Violation]:
    """Returns a problem for each run that neither the service knows nor the store has rollouts of."""
    found = []
    for field, run in settings.earlier_runs.items():
        name = f"{project}/trainingRuns/{run}"
        if run and not knows_run(name) and not await resources.has_rollouts(name):
            text = f"there is no training run {name}, and no rollout of one"
            found.append(Violation(field=f"settings.{field}", description=text))
    return found
