"""Projects (tenants): weight, quotas, retention, rules and model limits, updated under an etag.

Invariant: the name of a project never changes, and is never given to another one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from fulmen.errors import (
    ArgumentInvalid,
    DatabaseUnavailable,
    EtagMismatch,
    ProjectExists,
    ProjectNotFound,
    RolloutStateInvalid,
    Violation,
)
from fulmen.ids import DEFAULT_PROJECT, rollout_name
from fulmen_store.budgets import budget_problems
from fulmen_store.leases.leases import LeaseTable, Project
from fulmen_store.malformed import malformed
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.table import ProjectDraft, ProjectTable, ProjectView
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED, Wakeups
from fulmen_store.rollouts.transitions import RolloutState
from fulmen_store.scheduling.dispatcher import Dispatcher

__all__ = [
    "ProjectFollower",
    "Projects",
    "is_project_name",
    "unknown_project",
]

MAX_WEIGHT: Final = 1000
MAX_RUNNING: Final = 1_000_000
MAX_QUEUED: Final = 100_000_000
MAX_LIMITS: Final = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "concurrent_calls": 10**6,
    "attempt_token_budget": 10**12,
}
MIN_RETENTION_S: Final = 86_400.0
MAX_RETENTION_S: Final = 36_525 * 86_400.0
MIN_AGEING_S: Final = 1.0
MAX_AGEING_S: Final = 86_400.0
MAX_TEXT: Final = 128
# Changes reach all replicas within a second.
FOLLOW_INTERVAL_S: Final = 0.5

_log = structlog.get_logger()

_NAME: Final = re.compile(r"projects/[a-z0-9-]{1,63}")


class Projects:
    """Creates and changes projects."""

    def __init__(self, *, table: ProjectTable, wakeups: Wakeups) -> None:
        self._table = table
        self._wakeups = wakeups

    async def create(self, draft: ProjectDraft, *, request_id: str) -> ProjectView:
        """Creates a project.

        Raises:
            ArgumentInvalid: If the draft is invalid; lists every problem.
            ProjectExists: If the name is taken, unless by the same request.
        """
        violations = list(_problems(draft))
        if not is_project_name(draft.name):
            violations.insert(0, _violation("name", "is not of the form projects/{project}, 1 to 63 of [a-z0-9-]"))
        if len(request_id) > MAX_TEXT:
            violations.append(Violation(field="request_id", description="is longer than 128 characters"))
        _raise_if(violations, "The project cannot be created.")
        view = await self._table.add(draft, request_id=request_id)
        if view is None:
            text = "The project exists, or existed: change it with UpdateProject. The name of a deleted project cannot be used again."
            raise ProjectExists(text, project=draft.name)
        self._wakeups.announce([PROJECTS_CHANGED])
        return view

    async def get(self, name: str) -> ProjectView:
        """Returns a project.

        Raises:
            ProjectNotFound: If it does not exist.
        """
        view = await self._table.find(name) if is_project_name(name) else None
        if view is None:
            raise unknown_project(name)
        return view

    async def update(self, draft: ProjectDraft, *, etag: str) -> ProjectView:
        """Replaces every field of a project.

        Raises:
            ArgumentInvalid: If the draft is invalid; lists every problem.
            EtagMismatch: If it changed since it was read.
            ProjectNotFound: If it does not exist.
        """
        violations = list(_problems(draft))
        if not etag:
            violations.append(_violation("etag", "is required: read the project and send its etag"))
        _raise_if(violations, "The project cannot be changed.")
        known = await self.get(draft.name)
        changed = await self._table.replace(draft, revision=known.revision) if etag == known.etag else None
        if changed is None:
            raise EtagMismatch("The project has changed since it was read.", project=draft.name)
        self._wakeups.announce([PROJECTS_CHANGED])
        return changed

    async def delete(self, name: str, *, cancel: bool) -> None:
        """Deletes a project: it is as if it did not exist, and a background role removes what belongs to it. Idempotent.

        Raises:
            ArgumentInvalid: If it is the default project.
            ProjectNotFound: If it does not exist.
            RolloutStateInvalid: If one of its rollouts runs, unless they are to be cancelled.
        """
        if name == DEFAULT_PROJECT:
            raise malformed("name", "is the default project, which cannot be deleted")
        found = await self._table.delete(name, cancel=cancel) if is_project_name(name) else None
        if found is None:
            raise unknown_project(name)
        if found.running is not None:
            rollout = rollout_name(name, found.running)
            text = "A rollout of the project is running: wait until it has ended, or let the deletion cancel it."
            raise RolloutStateInvalid(text, rollout=rollout, state=RolloutState.RUNNING.name)
        self._wakeups.announce([PROJECTS_CHANGED])

    async def resume_agent(self, name: str, agent: str) -> bool:
        """Resumes a paused agent version of a project; returns whether it was paused.

        Raises:
            ArgumentInvalid: If no agent is named.
            ProjectNotFound: If the project does not exist.
        """
        if not agent:
            raise ArgumentInvalid(
                "The agent cannot be resumed.", violations=[Violation(field="agent", description="is required")]
            )
        await self.get(name)
        was_paused = await self._table.resume_agent(name, agent)
        self._wakeups.announce([PROJECTS_CHANGED])
        return was_paused


class ProjectFollower:
    """Background role: passes new and changed projects to the dispatcher, within a second."""

    def __init__(
        self,
        table: LeaseTable,
        dispatcher: Dispatcher,
        wakeups: Wakeups,
        metrics: StoreMetrics | None = None,
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._wakeups = wakeups
        self._known: dict[int, Project] = {}
        if metrics is not None:
            metrics.watch_paused_agents(self.paused_agents)

    async def run(self) -> None:
        """Follows until cancelled."""
        while True:
            seen = self._wakeups.count(PROJECTS_CHANGED)
            with contextlib.suppress(DatabaseUnavailable):
                await self.follow_once()
            await self._wakeups.wait(PROJECTS_CHANGED, since=seen, limit_s=FOLLOW_INTERVAL_S)

    def paused_agents(self) -> int:
        """Returns the number of paused agent versions of all projects."""
        return sum(len(project.terms.paused_agents) for project in self._known.values())

    async def follow_once(self) -> None:
        """Reads all projects once."""
        for project in await self._table.projects():
            known = self._known.get(project.project_id)
            if known != project:
                self._known[project.project_id] = project
                self._dispatcher.update_project(project)
                paused = project.terms.paused_agents
                if paused - (frozenset() if known is None else known.terms.paused_agents):
                    _log.warning("agent_paused", project=project.name, paused=len(paused))


def is_project_name(name: str) -> bool:
    """Returns whether a name has the form `projects/{project}`."""
    return _NAME.fullmatch(name) is not None


def unknown_project(name: str) -> ProjectNotFound:
    """Creates the error for a project that does not exist or that the caller may not access."""
    return ProjectNotFound(
        "The project does not exist: create it with `fulmen project create` (CreateProject).", project=name[:MAX_TEXT]
    )


def _problems(draft: ProjectDraft) -> Iterator[Violation]:
    if not 1 <= draft.weight <= MAX_WEIGHT:
        yield _violation("weight", f"is {draft.weight}, allowed are 1 to {MAX_WEIGHT}")
    if draft.max_running is not None and not 1 <= draft.max_running <= MAX_RUNNING:
        yield _violation("max_running", f"is {draft.max_running}, allowed are 1 to {MAX_RUNNING}")
    if draft.max_queued is not None and not 1 <= draft.max_queued <= MAX_QUEUED:
        yield _violation("max_queued", f"is {draft.max_queued}, allowed are 1 to {MAX_QUEUED}")
    if draft.retention_s is not None and not MIN_RETENTION_S <= draft.retention_s <= MAX_RETENTION_S:
        yield _violation("retention", f"is {draft.retention_s:g} s, allowed are 1 day to 100 years")
    if draft.ageing_interval_s != 0 and not MIN_AGEING_S <= draft.ageing_interval_s <= MAX_AGEING_S:
        text = f"is {draft.ageing_interval_s:g} s, allowed are 0 s and 1 s to 24 h"
        yield _violation("rules.ageing_interval", text)
    for path, limit in draft.limits.items():
        maximum = MAX_LIMITS[path.rpartition(".")[2]]
        if not 0 <= limit <= maximum:
            yield _violation(f"model_limits.{path}", f"is {limit}, allowed are 1 to {maximum}")
    yield from budget_problems(draft.budgets)


def _violation(path: str, description: str) -> Violation:
    return Violation(field=f"project.{path}", description=description)


def _raise_if(violations: Sequence[Violation], text: str) -> None:
    if violations:
        raise ArgumentInvalid(text, violations=violations)
