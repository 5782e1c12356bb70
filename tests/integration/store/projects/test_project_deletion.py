"""A deleted project is as if it had never been: nothing of it is left, and nothing of others is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fulmen.errors import (
    ArgumentInvalid,
    PermissionDenied,
    ProjectExists,
    ProjectNotFound,
    RolloutStateInvalid,
    TokenInvalid,
)
from fulmen.ids import uuid7
from fulmen.store.v1 import (
    call_service_pb2,
    resource_pb2,
    resource_service_pb2,
    rollout_service_pb2,
    run_lease_service_pb2,
    secret_service_pb2,
    stored_response_service_pb2,
    usage_service_pb2,
)
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.calls import new_call
from tests.support.store.rollouts import moment, renewing
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, create, create_project, replicas
from tests.support.store.spans import append, chunk_of

GONE, STAYS = "projects/gone", "projects/stays"
EMPTIED = "select emptied_at is not null from project where name = $1"


async def delete(stubs: Stubs, name: str = GONE, **fields: Any) -> None:
    """Deletes a project."""
    await stubs.projects.DeleteProject(pb.DeleteProjectRequest(name=name, **fields))


async def furnish(stubs: Stubs, project: str) -> str:
    """Gives a project something of everything; returns its token."""
    await create_project(stubs, project)
    kinds = [("agent.x", "bundle"), ("tool", "prompt")]
    versions = [
        resource_pb2.ResourceVersion(project=project, name=f"resources/{each}", ttl={"seconds": 86_400}, kind=kind)
        for each, kind in kinds
    ]
    await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=versions))
    alias = resource_service_pb2.SetAliasRequest(project=project, name="resources/tool/aliases/best", version=1)
    await stubs.resources.SetAlias(alias)
    run = f"{project}/trainingRuns/a"
    await stubs.run_leases.CreateRunLease(run_lease_service_pb2.CreateRunLeaseRequest(training_run=run))
    of_run = {"project": project, "training_run": run, "agent": "resources/agent.x/versions/1", "task_type": "sums"}
    names = await create(stubs, 2, request_id="once", group_id="g", group_size=3, **of_run)
    await create(stubs, group_id="g", group_size=3, not_before_time=moment(3600), **of_run)
    runner = await Runner(stubs).open()
    taken = await runner.take(2)
    await append(stubs, *(chunk_of(each.attempt) for each in taken))
    await runner.complete(taken)
    usage = usage_service_pb2.Usage(request_count=1)
    delta = usage_service_pb2.UsageDelta(project=project, attempt=f"{names[0]}/attempts/1", model="m", usage=usage)
    await stubs.usage.SyncUsage(
        usage_service_pb2.SyncUsageRequest(instance_id=project.rpartition("/")[2], sequence=1, usage=[delta])
    )
    await stubs.secrets.SetSecret(
        secret_service_pb2.SetSecretRequest(project=project, name="WEATHER_KEY", value=b"sunny-and-warm")
    )
    await stubs.calls.RecordCalls(call_service_pb2.RecordCallsRequest(calls=[new_call("c", project=project)]))
    await stubs.stored_responses.PutStoredResponse(
        stored_response_service_pb2.PutStoredResponseRequest(
            project=project, response=stored_response_service_pb2.StoredResponse(id=uuid7().hex)
        )
    )
    request = pb.IssueTokenRequest(project=project, role=pb.TOKEN_ROLE_CLIENT, subject="ann")
    return str((await stubs.projects.IssueToken(request)).token)


async def rows_of(connection: asyncpg.Connection, project_id: int) -> dict[str, int]:
    """Counts the rows that name a project, by table, and those of its rollouts and resources."""
    tables = await connection.fetch(
        "select c.table_name from information_schema.columns c join information_schema.tables t using (table_name)"
        " where c.column_name = 'project_id' and t.table_type = 'BASE TABLE' and c.table_schema = 'public'"
    )
    counts = {
        row[0]: await connection.fetchval(f"select count(*) from {row[0]} where project_id = $1", project_id)
        for row in tables
    }
    for table in ("attempt", "span_chunk"):
        counts[table] = await connection.fetchval(
            f"select count(*) from {table} where rollout_id in (select id from rollout where project_id = $1)",
            project_id,
        )
    return {table: count for table, count in counts.items() if count}


async def measured(connection: asyncpg.Connection) -> int:
    """Counts the task types with measured durations."""
    count: int = await connection.fetchval("select count(distinct task_type) from task_duration")
    return count


async def removed(store: StoreHandle, connection: asyncpg.Connection) -> None:
    """Removes what was deleted, as if a minute had passed."""
    await connection.execute(
        "update project set deleted_at = deleted_at - interval '1 hour' where deleted_at is not null"
    )
    await store.parts.roles["project-remover"].run_once()


async def test_nothing_of_a_deleted_project_is_left_and_nothing_of_another_is_gone(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection
) -> None:
    for project in (STAYS, GONE):
        await furnish(stubs, project)
    async with asyncio.timeout(LIMIT_S):
        while await measured(connection) < 2:  # noqa: ASYNC110  # written once a second
            await asyncio.sleep(0.05)
    ids = {row["name"]: row["id"] for row in await connection.fetch("select id, name from project")}
    before, spans = await rows_of(connection, ids[STAYS]), await connection.fetchval("select count(*) from span_chunk")
    assert before.keys() == (await rows_of(connection, ids[GONE])).keys()
    assert len(before) > 14
    await delete(stubs)
    await removed(store, connection)
    assert await rows_of(connection, ids[GONE]) == {}
    assert await rows_of(connection, ids[STAYS]) == before
    assert await connection.fetchval("select count(*) from span_chunk") == spans / 2
    assert await measured(connection) == 1
    for table in ("resource_version", "resource_alias", "resource_use", "attempt"):
        assert await connection.fetchval(f"select count(*) from {table}"), table
    # Other services may keep something under its name, which nobody else gets.
    with pytest.raises(ProjectExists, match="cannot be used again"):
        await create_project(stubs, GONE)
    with pytest.raises(ProjectNotFound):
        await stubs.projects.GetProject(pb.GetProjectRequest(name=GONE))
    assert await connection.fetchval(EMPTIED, GONE)


async def test_a_deleted_project_is_at_once_as_if_it_did_not_exist(store: StoreHandle, stubs: Stubs) -> None:
    token = await furnish(stubs, GONE)
    own = await store.stubs(token=token)
    await create(own, project=GONE)
    await delete(stubs)
    await delete(stubs)
    await store.parts.roles["project-follower"].follow_once()
    for call in (
        create(stubs, project=GONE),
        stubs.projects.GetProject(pb.GetProjectRequest(name=GONE)),
        stubs.rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest(project=GONE)),
        stubs.rollouts.PauseQueue(rollout_service_pb2.PauseQueueRequest(project=GONE)),
    ):
        with pytest.raises(ProjectNotFound):
            await call
    assert GONE not in {each.name for each in (await stubs.projects.ListProjects(pb.ListProjectsRequest())).projects}
    with pytest.raises(ProjectExists, match="cannot be used again"):
        await create_project(stubs, GONE)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await own.projects.GetProject(pb.GetProjectRequest())
            except TokenInvalid:
                break
            except ProjectNotFound:
                await asyncio.sleep(0.05)


async def test_another_replica_learns_that_a_project_is_deleted(database_url: str) -> None:
    async with replicas(database_url, 2) as (here, there):
        stubs, others = await here.stubs(), await there.stubs()
        await create_project(stubs, GONE)
        await create(others, project=GONE)
        await delete(stubs)
        await there.parts.roles["project-follower"].follow_once()
        with pytest.raises(ProjectNotFound):
            await create(others, project=GONE)


async def test_a_project_of_which_a_rollout_runs_is_deleted_only_if_it_may_be_cancelled(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection
) -> None:
    await create_project(stubs, GONE)
    (name,) = await create(stubs, project=GONE)
    async with renewing(await Runner(stubs).open()) as runner:
        (assignment,) = await runner.take(1)
        with pytest.raises(RolloutStateInvalid) as refused:
            await delete(stubs)
        assert refused.value.metadata == {"rollout": name, "state": "RUNNING"}
        (waiting,) = await create(stubs, project=GONE)
        await delete(stubs, cancel_running=True)
        await removed(store, connection)
        assert list((await runner.expect("cancel")).attempts) == [assignment.attempt]
        # The attempt has not ended: the project is still there.
        ids = [row["id"] for row in await connection.fetch("select id from rollout")]
        assert [str(each) for each in ids] == [name.rpartition("/")[2]]
        assert waiting not in {str(each) for each in ids}
        await connection.execute("update item set cancel_by = now()")
        async with asyncio.timeout(LIMIT_S):
            while await connection.fetchval("select count(*) from item"):  # noqa: ASYNC110  # state of the store
                await asyncio.sleep(0.05)
        await removed(store, connection)
        assert await connection.fetchval("select count(*) from rollout") == 0
        assert await connection.fetchval(EMPTIED, GONE)


async def test_a_project_that_was_just_deleted_is_emptied_and_stays_until_its_callers_are_gone(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection
) -> None:
    await create_project(stubs, GONE)
    await create(stubs, 3, project=GONE)
    await delete(stubs)
    await store.parts.roles["project-remover"].run_once()
    assert await connection.fetchval("select count(*) from rollout") == 0
    assert not await connection.fetchval(EMPTIED, GONE)


async def test_only_an_administrator_of_all_projects_deletes_one_and_never_the_default_one(
    store: StoreHandle, stubs: Stubs
) -> None:
    await create_project(stubs, GONE)
    own = await store.stubs(role=Role.ADMIN, project=GONE)
    with pytest.raises(PermissionDenied):
        await delete(own)
    with pytest.raises(ArgumentInvalid, match="default"):
        await delete(stubs, "projects/default")
    for name in ("projects/nobody", "gone", ""):
        with pytest.raises(ProjectNotFound):
            await delete(stubs, name)
    assert (await create(own))[0].startswith(GONE)
