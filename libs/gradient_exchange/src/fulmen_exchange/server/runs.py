"""The training runs that a server's callers may access; the host of the server decides."""

from __future__ import annotations

from typing import Protocol

Run = tuple[str, str]
"""Project and name of a training run; runs of different projects never meet."""


class RunAccess(Protocol):
    """What the servicer needs to know of runs and of the current caller."""

    def resolve(self, name: str) -> Run:
        """Returns a run that the current caller may access.

        Raises:
            TrainingRunNotFound: if there is no such run, or the caller may not access it.
        """

    def may_access(self, project: str) -> bool:
        """Returns whether the current caller may access the runs of a project."""

    def is_over(self, run: Run) -> bool:
        """Returns whether a run will never resume, so that its stored sums can be deleted."""


class OpenRuns:
    """Lets every caller access every run, for servers inside a trusted network."""

    def resolve(self, name: str) -> Run:
        """See `RunAccess`; all runs are of one project."""
        return "projects/default", name

    def may_access(self, project: str) -> bool:
        """See `RunAccess`."""
        return True

    def is_over(self, run: Run) -> bool:
        """See `RunAccess`; unknown here, so stored sums are deleted by age."""
        return False
