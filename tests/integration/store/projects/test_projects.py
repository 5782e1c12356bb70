"""Projects are created once, changed by who has read them, and followed by every replica."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from fulmen.errors import (
    ArgumentInvalid,
    EtagMismatch,
    PageTokenInvalid,
    PermissionDenied,
    ProjectExists,
    ProjectNotFound,
)
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1.rollout_service_pb2 import QueueRules
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import (
    Runner,
    StoreHandle,
    Stubs,
    create,
    create_project,
    pages_of,
    queue_stats,
    running_store,
)

DAY_S = 86_400


async def read(stubs: Stubs, name: str = "") -> pb.Project:
    response = await stubs.projects.GetProject(pb.GetProjectRequest(name=name))
    project: pb.Project = response.project
    return project


async def update(stubs: Stubs, project: pb.Project) -> pb.Project:
    response = await stubs.projects.UpdateProject(pb.UpdateProjectRequest(project=project))
    changed: pb.Project = response.project
    return changed


async def test_a_project_is_read_back_as_it_was_created(stubs: Stubs) -> None:
    rules = QueueRules(affinity=False, ageing_interval={"seconds": 30})
    created = await create_project(
        stubs,
        "projects/a",
        weight=300,
        max_running=7,
        max_queued=70,
        retention={"seconds": 3 * DAY_S},
        rules=rules,
    )
    assert created == await read(stubs, "projects/a")
    assert (created.weight, created.max_running, created.max_queued) == (300, 7, 70)
    assert created.retention.seconds == 3 * DAY_S
    assert created.rules == rules
    assert created.etag
    assert created.HasField("create_time")


async def test_every_problem_is_told_at_once(stubs: Stubs) -> None:
    project = pb.Project(
        name="projects/UPPER",
        weight=1001,
        max_running=-1,
        max_queued=200_000_000,
        retention={"seconds": 5},
        rules=QueueRules(ageing_interval={"nanos": 5}),
    )
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.projects.CreateProject(pb.CreateProjectRequest(project=project, request_id="x" * 129))
    assert {violation.field for violation in refused.value.violations} == {
        "project.name",
        "project.weight",
        "project.max_running",
        "project.max_queued",
        "project.retention",
        "project.rules.ageing_interval",
        "request_id",
    }
    with pytest.raises(ArgumentInvalid):
        await create_project(stubs, "projects/*")


async def test_a_name_is_taken_once_and_a_repeated_request_gets_its_first_answer(stubs: Stubs) -> None:
    request = pb.CreateProjectRequest(project=pb.Project(name="projects/a", weight=5), request_id="once")
    first, second = await asyncio.gather(*(stubs.projects.CreateProject(request) for _ in range(2)))
    assert first == second == await stubs.projects.CreateProject(request)
    with pytest.raises(ProjectExists):
        await create_project(stubs, "projects/a")
    request.project.name = "projects/b"
    assert (await stubs.projects.CreateProject(request)).project.name == "projects/a"
    with pytest.raises(ProjectNotFound):
        await read(stubs, "projects/b")


async def test_an_update_replaces_every_field_and_needs_the_etag_that_was_read(stubs: Stubs) -> None:
    read_first = await create_project(stubs, "projects/a", weight=5, max_running=1, retention={"seconds": DAY_S})
    changed = await update(stubs, pb.Project(name="projects/a", etag=read_first.etag, max_queued=9))
    assert (changed.weight, changed.max_running, changed.max_queued) == (100, 0, 9)
    assert not changed.HasField("retention")
    assert changed.create_time == read_first.create_time
    for etag in (read_first.etag, "anything else"):
        with pytest.raises(EtagMismatch):
            await update(stubs, pb.Project(name="projects/a", etag=etag))
    with pytest.raises(ArgumentInvalid) as refused:
        await update(stubs, pb.Project(name="projects/a", weight=-5))
    assert [violation.field for violation in refused.value.violations] == ["project.weight", "project.etag"]
    with pytest.raises(ProjectNotFound):
        await update(stubs, pb.Project(name="projects/none", etag="1"))


async def test_of_two_updates_at_once_one_is_told_to_read_again(stubs: Stubs) -> None:
    project = await create_project(stubs, "projects/a")
    outcomes = await asyncio.gather(*(update(stubs, project) for _ in range(4)), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["EtagMismatch"] * 3 + ["Project"]


async def test_projects_are_listed_by_name_page_by_page(stubs: Stubs) -> None:
    names = ["projects/" + "".join(two) for two in itertools.product("ab-", "xy")] + ["projects/" + "z" * 63]
    for name in names:
        await create_project(stubs, name)
    pages = await pages_of(stubs.projects.ListProjects, pb.ListProjectsRequest(page_size=3))
    found = [project.name for page in pages for project in page.projects]
    assert sorted(found) == sorted([*names, "projects/default"])
    assert len(set(found)) == len(found)
    for wrong, error in (({"page_token": "zzz"}, PageTokenInvalid), ({"page_size": -1}, ArgumentInvalid)):
        with pytest.raises(error):
            await stubs.projects.ListProjects(pb.ListProjectsRequest(**wrong))


async def test_a_project_that_nobody_created_is_not_found_and_not_made(stubs: Stubs) -> None:
    with pytest.raises(ProjectNotFound, match="CreateProject"):
        await create(stubs, project="projects/none")
    with pytest.raises(ProjectNotFound):
        await queue_stats(stubs, project="projects/none")
    with pytest.raises(ProjectNotFound):
        await read(stubs, "projects/none")


async def test_an_administrator_of_one_project_sees_and_changes_that_one_only(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    bound = await store.stubs(role=Role.ADMIN, project="projects/a")
    own = await read(bound)
    assert own.name == "projects/a"
    assert (await update(bound, pb.Project(name="projects/a", etag=own.etag, weight=7))).weight == 7
    listed = await bound.projects.ListProjects(pb.ListProjectsRequest())
    assert [project.name for project in listed.projects] == ["projects/a"]
    with pytest.raises(ProjectNotFound):
        await update(bound, pb.Project(name="projects/b", etag="1"))
    with pytest.raises(PermissionDenied):
        await create_project(bound, "projects/c")


async def test_a_replica_that_is_busy_follows_a_change_that_another_one_made(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    project = await create_project(stubs, "projects/a", max_running=1)
    await create(stubs, 3, project="projects/a")
    async with running_store(database_url) as other:
        runner = await Runner(await other.stubs()).open()
        await runner.demand(3)
        (first,) = (await runner.expect("assign")).assignments
        assert first.rollout.project == "projects/a"
        project.max_running = 3
        await update(stubs, project)
        rest: list[str] = []
        while len(rest) < 2:
            rest += [one.attempt for one in (await runner.expect("assign")).assignments]
