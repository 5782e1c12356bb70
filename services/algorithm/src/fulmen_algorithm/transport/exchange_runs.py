"""Access of ranks to the training runs whose gradients they exchange, by the token of the call."""

from __future__ import annotations

from fulmen.errors import TrainingRunNotFound
from fulmen.ids import ALL_PROJECTS
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_exchange.server.runs import Run
from fulmen_service_kit.security.auth import current_caller

MAX_NAME = 128


class CallerRuns:
    """The runs that the token of the current call may access.

    A run that this service does not know belongs to another service and only has shards here; its project is that of the
    caller's token.
    """

    def __init__(self, runs: RunRegistry) -> None:
        self._runs = runs

    def resolve(self, name: str) -> Run:
        """Returns a run that the caller may access.

        Raises:
            TrainingRunNotFound: if there is none, also if another project has it.
        """
        caller = current_caller()
        try:
            project = self._runs.project_of(name)
        except TrainingRunNotFound:
            if caller.project == ALL_PROJECTS or len(name) > MAX_NAME:
                raise
            project = caller.project
        if not caller.may_access(project):
            raise TrainingRunNotFound("There is no such training run.", training_run=name[:MAX_NAME])
        return project, name

    def may_access(self, project: str) -> bool:
        """Returns whether the caller's token covers a project."""
        return current_caller().may_access(project)

    def is_over(self, run: Run) -> bool:
        """Returns whether a run will never resume."""
        project, name = run
        return self._runs.is_over(name, project)
