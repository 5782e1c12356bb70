"""The audit log can be read by admins, each of their own project, newest first."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any
from uuid import UUID

import pytest

from fulmen.errors import ArgumentInvalid, PageTokenInvalid, PermissionDenied, ProjectNotFound
from fulmen.store.v1 import audit_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_service_pb2
from fulmen_service_kit.security.tokens import Role
from fulmen_store.audit import writer
from fulmen_store.audit.table import AuditTable
from fulmen_store.audit.writer import AuditWriter
from fulmen_store.database.database import Database
from tests.support.store.running import StoreHandle, Stubs, create, create_project, pages_of, running_store

LIMIT_S = 20.0


async def entries(stubs: Stubs, **selection: Any) -> list[pb.AuditEntry]:
    """Returns entries, newest first."""
    answer = await stubs.audit.ListAuditEntries(pb.ListAuditEntriesRequest(**selection))
    return list(answer.entries)


async def until(stubs: Stubs, count: int, **selection: Any) -> list[pb.AuditEntry]:
    """Waits until there are so many entries."""
    async with asyncio.timeout(LIMIT_S):
        while len(found := await entries(stubs, **selection)) < count:  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.02)
    return found


async def pause(stubs: Stubs, project: str = "", reason: str = "") -> None:
    """Pauses a project's queue, which is audited."""
    await stubs.rollouts.PauseQueue(rollout_service_pb2.PauseQueueRequest(project=project, reason=reason))


async def test_an_entry_says_who_did_what_to_what_with_which_result(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    ann = await store.stubs(token=store.token(Role.CLIENT, project="projects/a", subject="ann"))
    await pause(ann, reason="lunch")
    with pytest.raises(PermissionDenied):
        await ann.projects.IssueToken(
            prj.IssueTokenRequest(project="projects/a", subject="bob", role=prj.TOKEN_ROLE_ADMIN)
        )
    refused, paused = await until(stubs, 2, actor="ann")
    assert (paused.action, paused.code, paused.role, paused.project) == (
        "RolloutService/PauseQueue", "OK", "client", "projects/a",
    )  # fmt: skip
    assert json.loads(paused.request_json) == {"reason": "lunch"}
    assert (refused.action, refused.code, refused.reason) == (
        "ProjectService/IssueToken", "PERMISSION_DENIED", "PERMISSION_DENIED",
    )  # fmt: skip
    assert refused.time.ToNanoseconds() >= paused.time.ToNanoseconds()
    assert await entries(stubs, actor="ann", errors_only=True) == [refused]
    assert await entries(stubs, action="ProjectService", actor="ann") == [refused]
    assert await entries(stubs, action="PauseQueue") == [paused]
    assert await entries(stubs, action="RolloutService/PauseQueue") == [paused]
    assert await entries(stubs, action="Rollout") == []


async def test_entries_of_a_time_are_those_from_its_start_until_before_its_end(stubs: Stubs) -> None:
    await pause(stubs)
    (entry,) = await until(stubs, 1)
    at = entry.time.ToDatetime(tzinfo=datetime.UTC)
    hour = datetime.timedelta(hours=1)
    for start, end, count in ((-hour, hour, 1), (-hour, -hour / 2, 0), (hour, 2 * hour, 0)):
        assert len(await entries(stubs, start_time=at + start, end_time=at + end)) == count


async def test_an_admin_of_a_project_sees_what_was_done_in_it_and_nothing_of_others(
    store: StoreHandle, stubs: Stubs
) -> None:
    for name in ("projects/a", "projects/b"):
        await create_project(stubs, name)
    of_a = await store.stubs(role=Role.ADMIN, project="projects/a")
    of_b = await store.stubs(role=Role.ADMIN, project="projects/b")
    # By an admin of all projects, and by one of b who tries what is a's.
    await pause(stubs, "projects/a", "by all")
    with pytest.raises(PermissionDenied):
        await pause(of_b, "projects/a", "by b")
    await until(stubs, 4)
    assert [json.loads(each.request_json)["reason"] for each in await entries(of_a)] == ["by all"]
    assert [json.loads(each.request_json)["reason"] for each in await entries(of_b)] == ["by b"]
    created = await entries(stubs, action="CreateProject")
    assert {each.project for each in created} == {"projects/*"}
    assert len(await entries(stubs, project="projects/a")) == 1
    with pytest.raises(PermissionDenied):
        await entries(of_b, project="projects/a")
    with pytest.raises(ProjectNotFound):
        await entries(stubs, project="projects/nobody")
    client = await store.stubs(role=Role.CLIENT, project="projects/a")
    with pytest.raises(PermissionDenied):
        await entries(client)


async def test_a_list_of_many_entries_has_pages_that_belong_to_its_filter(stubs: Stubs) -> None:
    for number in range(7):
        await pause(stubs, reason=str(number))
    await until(stubs, 7)
    pages = await pages_of(stubs.audit.ListAuditEntries, pb.ListAuditEntriesRequest(page_size=3))
    assert [len(page.entries) for page in pages] == [3, 3, 1]
    reasons = [json.loads(each.request_json)["reason"] for page in pages for each in page.entries]
    assert sorted(reasons, reverse=True) == [str(number) for number in reversed(range(7))]
    token = pages[0].next_page_token
    with pytest.raises(PageTokenInvalid):
        await entries(stubs, page_token=token, actor="ann")
    with pytest.raises(ArgumentInvalid):
        await entries(stubs, actor="x" * 129)


async def test_the_lists_of_a_large_request_are_cut(stubs: Stubs) -> None:
    versions = [
        resource_pb2.ResourceVersion(name=f"resources/{number:03}{'x' * 120}", kind="prompt", content=b"{}")
        for number in range(64)
    ]
    for _ in range(2):
        await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=versions))
    names = ["\N{GRINNING FACE}" * 200] * 64
    with pytest.raises(ArgumentInvalid):
        await stubs.rollouts.CancelRollouts(rollout_service_pb2.CancelRolloutsRequest(names=names))
    cancelled, published, _ = await until(stubs, 3)
    assert len(json.loads(published.request_json)["resources.name"]) == 64
    asked = json.loads(cancelled.request_json)
    assert (len(asked["names"]), asked["cut"]) == (8, True)


async def test_a_store_that_stops_writes_the_last_entries(database_url: str, connection: Any) -> None:
    async with running_store(database_url) as store:
        await pause(await store.stubs())
    assert await connection.fetchval("select count(*) from audit_entry where action like '%PauseQueue'") == 1


async def test_old_entries_and_those_beyond_the_newest_of_a_project_are_deleted(
    store: StoreHandle, stubs: Stubs, connection: Any
) -> None:
    await pause(stubs)
    await until(stubs, 1)
    copy = """
        insert into audit_entry
        select uuid7_bound(now() - $1 * interval '1 day' + n * interval '1 ms'), $2, action, code, reason, actor, role,
            token_id, request, trace_id, n, ended_at
        from audit_entry, generate_series(1, $3) as n where actor = 'tests'
    """
    await connection.execute(copy, 400, "projects/old", 5)
    mine = copy.replace("where actor", "where project = 'projects/default' and actor")
    await connection.execute(mine, 1, "projects/many", 100_003)
    await store.parts.roles["age-retention"].run_once()
    counts = dict(await connection.fetch("select project, count(*) from audit_entry group by project"))
    assert counts == {"projects/default": 1, "projects/many": 100_000}
    assert await connection.fetchval("select min(left_out) from audit_entry where project = 'projects/many'") == 4


async def test_entries_that_do_not_fit_are_counted_in_the_next_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 2)
    table = AuditTable(database)
    kept = AuditWriter(table)
    for _ in range(5):
        kept.note(line())
    await kept.write_once()
    kept.note(line())
    await kept.write_once()
    await kept.write_once()
    found = await connection_counts(database)
    assert sorted(found) == [0, 0, 3]


async def test_entries_of_a_deleted_project_go_with_it(store: StoreHandle, stubs: Stubs, connection: Any) -> None:
    await create_project(stubs, "projects/a")
    await create(stubs, project="projects/a")
    await pause(stubs, "projects/a")
    await stubs.projects.DeleteProject(prj.DeleteProjectRequest(name="projects/a"))
    await until(stubs, 3)
    await connection.execute(
        "update project set deleted_at = deleted_at - interval '1 hour' where deleted_at is not null"
    )
    async with asyncio.timeout(LIMIT_S):
        while await connection.fetchval("select count(*) from project where emptied_at is not null") == 0:
            await store.parts.roles["project-remover"].run_once()
    assert [entry.action for entry in await entries(stubs)] == [
        "ProjectService/DeleteProject",
        "ProjectService/CreateProject",
    ]


def line() -> dict[str, Any]:
    """Returns a line of the audit log."""
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "rpc": "/fulmen.store.v1.RolloutService/PauseQueue",
        "code": "OK",
        "reason": "",
        "role": "client",
        "subject": "ann",
        "project": "projects/a",
        "token_id": "",
        "asked": {},
        "trace_id": "",
    }


async def connection_counts(database: Database) -> list[int]:
    """Returns how many calls each entry says got none."""
    first, last = (UUID(int=number) for number in (0, 2**128 - 1))
    found = await AuditTable(database).page(project=None, first=first, before=last, limit=100)
    return [entry.left_out for entry in found]
