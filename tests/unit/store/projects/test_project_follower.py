"""A replica hears of every project that is new or has changed, and of no other."""

from __future__ import annotations

from dataclasses import replace

from fulmen_store.leases.leases import Project
from fulmen_store.projects.projects import ProjectFollower
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.scheduling.rules import QueueTerms


async def test_only_what_changed_is_told() -> None:
    table = [Project(project_id=number, name=f"projects/{number}") for number in (1, 2)]
    told: list[int] = []

    class Double:
        async def projects(self) -> list[Project]:
            return list(table)

        def update_project(self, project: Project) -> None:
            told.append(project.project_id)

    follower = ProjectFollower(table=Double(), dispatcher=Double(), wakeups=Wakeups())
    await follower.follow_once()
    await follower.follow_once()
    assert told == [1, 2]
    table[1] = replace(table[1], terms=QueueTerms(weight=7))
    table.append(Project(project_id=3, name="projects/3"))
    await follower.follow_once()
    assert told == [1, 2, 2, 3]
