"""No rpc shows, changes or betrays anything of another project.

Each rpc is asked for things of project b with tokens of project a, then for things that nobody has: the answers are the
same, and what b has is unchanged. An rpc that is served and not in the table fails the test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, replace
from typing import Any
from uuid import UUID

import aiohttp
import asyncpg
import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.errors import FulmenError
from fulmen.ids import AttemptName, parse_rollout_name, rollout_name, uuid7
from fulmen.store.v1 import (
    lease_pb2,
    project_service_pb2,
    resource_pb2,
    resource_service_pb2,
    rollout_service_pb2,
    span_service_pb2,
)
from fulmen_service_kit.security.tokens import RUN_ROLES, Role, TokenSigner
from tests.support.store.rollouts import renewing
from tests.support.store.rpc_roles import MAY_CALL
from tests.support.store.rpc_table import (
    EXPORT,
    LISTINGS,
    PROBES,
    Things,
    absent,
    chunk_of,
    export_of,
)
from tests.support.store.rpcs import Outcome, Rpc, answer_of, listed_rpcs
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project

SECRET = "only b knows"
SUBJECT = "same-subject"
pb, res, prj = rollout_service_pb2, resource_service_pb2, project_service_pb2


@pytest.fixture
async def channel(store: StoreHandle) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel that sends no token by itself."""
    async with grpc.aio.insecure_channel(store.target) as opened_channel:
        yield opened_channel


@pytest.fixture
async def rpcs(channel: grpc.aio.Channel) -> dict[str, Rpc]:
    """Returns what the store serves."""
    return await listed_rpcs(channel)


def token_of(role: Role, project: str = "projects/a") -> str:
    if role is Role.ATTEMPT:
        name = AttemptName(project=project, rollout_id=uuid7(), number=1)
        return TokenSigner(SIGNING_KEY).attempt_key(
            name, project=project, lease_id=str(uuid7()), epoch=1, mode="train", ttl_s=600
        )
    run = f"{project}/trainingRuns/r" if role in RUN_ROLES else ""
    return TokenSigner(SIGNING_KEY).issue(role, subject=SUBJECT, ttl_s=600, project=project, training_run=run)


async def furnish(store: StoreHandle, admin: Stubs) -> tuple[Things, Runner]:
    """Gives project b one of everything."""
    service = await store.stubs(token=token_of(Role.SERVICE, "projects/b"))
    secrets: dict[str, Any] = {"training_run": "projects/b/trainingRuns/b", "metadata": {"secret": SECRET}}
    (running,) = await create(service, input=SECRET.encode(), **secrets)
    runner = await Runner(await store.stubs(token=token_of(Role.RUNNER, "projects/b"))).open()
    (assignment,) = await runner.take(1)
    (waiting,) = await create(service, input=SECRET.encode(), **secrets)
    version = resource_pb2.ResourceVersion(name="resources/of-b", kind="bundle", content=SECRET.encode())
    await service.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))
    issued = await admin.projects.IssueToken(
        prj.IssueTokenRequest(project="projects/b", role=prj.TOKEN_ROLE_CLIENT, subject=SECRET)
    )
    things = Things(
        project="projects/b",
        waiting=waiting,
        running=running,
        attempt=assignment.attempt,
        session=runner.session_id,
        resource="resources/of-b",
        token_id=issued.token_id,
        token=issued.token,
    )
    chunks = service.spans.AppendSpans()
    await chunks.write(span_service_pb2.AppendSpansRequest(chunks=[chunk_of(things)]))
    assert (await chunks.read()).accepted_count == 1
    return things, runner


async def test_every_rpc_that_is_served_is_listed_here(rpcs: dict[str, Rpc]) -> None:
    assert set(PROBES) | set(LISTINGS) == set(rpcs)
    assert set(MAY_CALL) == set(rpcs)


async def test_things_of_another_project_are_as_if_they_did_not_exist(
    store: StoreHandle, stubs: Stubs, rpcs: dict[str, Rpc], channel: grpc.aio.Channel, database_url: str
) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    things, runner = await furnish(store, stubs)
    none = absent()
    before = await _everything_of_b(database_url, things)
    told: list[str] = []
    async with renewing(runner):
        for path, probes in PROBES.items():
            for number, probe in enumerate(probes):
                for role in sorted(MAY_CALL[path] - {Role.ATTEMPT}):
                    answers = [
                        _leveled(await _asked(channel, rpcs[path], probe(asked), token_of(role)), asked)
                        for asked in (things, none)
                    ]
                    if answers[0] != answers[1]:
                        told.append(f"{path} #{number} as {role}:\n  of b:   {answers[0]}\n  absent: {answers[1]}")
    assert not told, "\n".join(told)
    assert await _everything_of_b(database_url, things) == before
    assert await runner.complete([lease_pb2.Assignment(attempt=things.attempt, lease_id=things.session, epoch=1)]) == [
        1
    ]


def renamed(things: Things, rollout_ids: Sequence[UUID]) -> Things:
    """Returns names of two rollouts in project a, and whatever else there is of b."""
    waiting, running = (rollout_name("projects/a", one) for one in rollout_ids)
    return replace(things, project="projects/a", waiting=waiting, running=running, attempt=f"{running}/attempts/1")


@pytest.mark.parametrize("bound_to", ["projects/a", "projects/b", "projects/*"])
async def test_a_name_with_a_project_other_than_the_rollouts_own_answers_like_an_unknown_one(
    store: StoreHandle, stubs: Stubs, rpcs: dict[str, Rpc], channel: grpc.aio.Channel, database_url: str, bound_to: str
) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    things, runner = await furnish(store, stubs)
    misnamed = renamed(things, [parse_rollout_name(name).rollout_id for name in (things.waiting, things.running)])
    unknown = renamed(things, [uuid7(), uuid7()])
    before = await _everything_of_b(database_url, things)
    different: list[str] = []
    count = 0
    for path, probes in PROBES.items():
        for number, probe in enumerate(probes):
            requests = [probe(asked) for asked in (misnamed, unknown)]
            # What names no rollout is the same request; a session that is resumed releases what is not listed.
            if requests[0] == requests[1] or (bound_to == "projects/b" and "open" in str(requests[0][0])):
                continue
            count += 1
            for role in sorted(MAY_CALL[path] - {Role.ATTEMPT}):
                token = token_of(role, bound_to)
                answers = [
                    _leveled(await _asked(channel, rpcs[path], request, token), asked)
                    for request, asked in zip(requests, (misnamed, unknown), strict=True)
                ]
                if answers[0] != answers[1]:
                    different.append(f"{path} #{number} as {role}:\n  of b:    {answers[0]}\n  unknown: {answers[1]}")
    assert count >= 18
    assert not different, "\n".join(different)
    # A proxy that reports for b is of b.
    assert await _everything_of_b(database_url, things) | {"usage_window": []} == before
    assert await runner.complete([lease_pb2.Assignment(attempt=things.attempt, lease_id=things.session, epoch=1)]) == [
        1
    ]


async def test_spans_that_are_posted_for_another_project_are_as_if_for_no_rollout(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    things, _ = await furnish(store, stubs)
    before = await _everything_of_b(database_url, things)
    url = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
    async with aiohttp.ClientSession() as session:
        for role in sorted(MAY_CALL[EXPORT]):
            for kind in ("x-protobuf", "json"):
                headers = {"authorization": f"Bearer {token_of(role)}", "content-type": f"application/{kind}"}
                told = []
                for asked in (things, absent()):
                    export = export_of(asked)
                    body = _otlp_json(export) if kind == "json" else export.SerializeToString()
                    async with session.post(url, data=body, headers=headers) as answer:
                        told.append((answer.status, await answer.read()))
                assert told[0] == told[1]
                assert told[0][0] == 200
    assert await _everything_of_b(database_url, things) == before


async def test_lists_do_not_tell_whether_another_project_has_anything(
    store: StoreHandle, stubs: Stubs, rpcs: dict[str, Rpc], channel: grpc.aio.Channel
) -> None:
    await create_project(stubs, "projects/a")

    async def told() -> dict[tuple[str, Role], str]:
        cells = [(path, role) for path in LISTINGS for role in sorted(MAY_CALL[path] - {Role.ATTEMPT})]
        answers = await asyncio.gather(
            *(answer_of(channel, rpcs[path], LISTINGS[path], token=token_of(role)) for path, role in cells)
        )
        return {cell: _leveled(answer, absent()) for cell, answer in zip(cells, answers, strict=True)}

    alone = await told()
    await create_project(stubs, "projects/b")
    things, runner = await furnish(store, stubs)
    await runner.demand(5)
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=things.token_id))
    assert await told() == alone


def _otlp_json(export: trace_service_pb2.ExportTraceServiceRequest) -> bytes:
    """Writes an export as OTLP/HTTP wants it: ids in hexadecimal."""
    values = MessageToDict(export)
    for resource_spans in values["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                span |= {"traceId": "ab" * 16, "spanId": "cd" * 8}
    return json.dumps(values).encode()


async def _asked(channel: grpc.aio.Channel, rpc: Rpc, requests: Sequence[Message], token: str) -> Outcome:
    """Returns as many answers as there are requests: that of a stream which was opened before is one."""
    return await answer_of(channel, rpc, *requests, token=token, answers=len(requests))


def _leveled(outcome: Outcome, asked: Things) -> str:
    """Writes an answer so that answers about other names, and of another moment, are equal."""
    if isinstance(outcome, FulmenError):
        text = repr((type(outcome).__name__, outcome.message, outcome.metadata, outcome.violations))
    else:
        text = repr([MessageToDict(message) for message in outcome])
    for field in fields(asked):
        text = text.replace(getattr(asked, field.name), f"<{field.name}>")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "<id>", text)
    # A place in the feed of all projects' changes: a number of a transaction, opaque.
    text = re.sub(r"'cursor': '[^']*'", "<cursor>", text)
    text = re.sub(r"'age': '[^']*'", "<age>", text)
    return re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "<time>", text)


async def _everything_of_b(database_url: str, things: Things) -> dict[str, list[str]]:
    """Returns every row of the database that has to do with project b or its things, but for the log of who asked."""
    connection = await asyncpg.connect(database_url)
    try:
        number = await connection.fetchval("select id from project where name = $1", things.project)
        marks = [str(parse_rollout_name(name).rollout_id) for name in (things.waiting, things.running)]
        marks += [things.session, things.token_id, things.project]
        tables = await connection.fetch(
            "select tablename from pg_tables where schemaname = 'public' and tablename <> 'audit_entry'"
        )
        found: dict[str, list[str]] = {}
        for (table,) in tables:
            rows = await connection.fetch(f"select t::text, to_jsonb(t) ->> 'project_id' from \"{table}\" t")
            kept = [row[0] for row in rows if row[1] == str(number) or any(mark in row[0] for mark in marks)]
            if table == "runner_session":
                # The session lives: when its lease ends moves on.
                kept = [re.sub(r'"[^"]*"', "<time>", row) for row in kept]
            found[table] = sorted(kept)
        for table in ("rollout", "item", "issued_token", "runner_session"):
            assert found[table]
        return found
    finally:
        await connection.close()
