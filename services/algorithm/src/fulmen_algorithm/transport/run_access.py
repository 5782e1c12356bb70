"""Access of a caller to training runs, by the project in the name: checked before anything is looked up."""

from __future__ import annotations

from fulmen.errors import ArgumentInvalid
from fulmen.ids import parse_training_run_name
from fulmen_algorithm.runs.registry import RunRegistry, unknown_run
from fulmen_service_kit.security.auth import current_caller


def project_in(name: str) -> str:
    """Returns the project in the name of a run; empty if the name has none or is malformed."""
    try:
        return parse_training_run_name(name).project
    except ArgumentInvalid:
        return ""


def require_run_access(name: str) -> None:
    """Checks that the caller may access a run of this name, if there is one.

    Raises:
        TrainingRunNotFound: if it may not, or the name is malformed.
    """
    project = project_in(name)
    if not project or not current_caller().may_access(project):
        raise unknown_run(name)


def require_own_run(name: str) -> None:
    """Checks that the caller may access a run, and that its token names no other.

    Raises:
        TrainingRunNotFound: if that is not so, or the name is malformed.
    """
    require_run_access(name)
    if current_caller().training_run not in ("", name):
        raise unknown_run(name)


class CallerRuns:
    """The runs whose gradients the caller may exchange; see `fulmen_exchange.server.runs.RunAccess`.

    A run that this service does not know belongs to another service and only has shards here.
    """

    def __init__(self, runs: RunRegistry) -> None:
        self._runs = runs

    def require(self, name: str) -> None:
        """Checks that the caller may access a run; see `require_run_access`."""
        require_run_access(name)

    def is_over(self, name: str) -> bool:
        """Returns whether a run will never resume."""
        return self._runs.is_over(name)
