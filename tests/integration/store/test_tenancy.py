"""No rpc shows, changes or betrays anything of another project, and every role may call just what the table says.

Each rpc is asked for things of project b with tokens of project a, then for things that nobody has: the answers are the
same, and what b has is unchanged. An rpc that is served and not listed here fails the test.
"""

from __future__ import annotations

import datetime
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
import asyncpg
import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid, FulmenError, PermissionDenied
from fulmen.ids import AttemptName, parse_attempt_name, rollout_name, uuid7
from fulmen.store.v1 import (
    lease_pb2,
    lease_service_pb2,
    peer_service_pb2,
    project_service_pb2,
    resource_pb2,
    resource_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    runner_registry_service_pb2,
    span_pb2,
    span_service_pb2,
)
from fulmen_service_kit.tokens import Role, TokenSigner
from tests.support.rpcs import Outcome, Rpc, answer_of, exchange, listed_rpcs
from tests.support.store import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project

ROLLOUTS, LEASES, SPANS = (f"/fulmen.store.v1.{name}Service/" for name in ("Rollout", "Lease", "Span"))
RESOURCES, RUNNERS, PROJECTS = (
    f"/fulmen.store.v1.{name}Service/" for name in ("Resource", "RunnerRegistry", "Project")
)
NOTIFY = "/fulmen.store.v1.PeerService/Notify"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

ROLES = (Role.ADMIN, Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER)
SECRET = "only b knows"
SUBJECT = "same-subject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Things:
    """Names of things: those of project b, or such as nobody has."""

    project: str
    waiting: str
    running: str
    attempt: str
    session: str
    resource: str
    token_id: str


def absent() -> Things:
    running = rollout_name(uuid7())
    return Things(
        project="projects/nobody",
        waiting=rollout_name(uuid7()),
        running=running,
        attempt=f"{running}/attempts/1",
        session=str(uuid7()),
        resource="resources/nobody",
        token_id="n" * 21 + "A",
    )


def result_of(things: Things) -> lease_pb2.AttemptResult:
    return lease_pb2.AttemptResult(attempt=things.attempt, lease_id=things.session, epoch=1)


def chunk_of(things: Things) -> span_pb2.SpanChunk:
    return span_pb2.SpanChunk(
        attempt=things.attempt,
        chunk_id=str(uuid.UUID(int=7)),
        span_count=1,
        codec=span_pb2.SPAN_CODEC_IDENTITY,
        payload=span_pb2.SpanBatch(spans=[span_pb2.SpanRecord(scope="x")]).SerializeToString(),
    )


def export_of(things: Things) -> trace_service_pb2.ExportTraceServiceRequest:
    span = trace_pb2.Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="x")
    span.attributes.add(key="fulmen.rollout").value.string_value = things.running
    span.attributes.add(key="fulmen.attempt").value.int_value = 1
    request = trace_service_pb2.ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.append(span)
    return request


def opened(**fields_of_open: Any) -> lease_service_pb2.StreamLeasesRequest:
    return lease_service_pb2.StreamLeasesRequest(open=lease_service_pb2.OpenSession(**fields_of_open))


def new_version(things: Things, **changes: Any) -> resource_pb2.ResourceVersion:
    return resource_pb2.ResourceVersion(**({"name": things.resource, "kind": "bundle"} | changes))


pb, leases, res, prj = rollout_service_pb2, lease_service_pb2, resource_service_pb2, project_service_pb2
Probe = Callable[[Things], Sequence[Message]]

# What can be asked for by name, per rpc: the messages of one call.
PROBES: dict[str, list[Probe]] = {
    ROLLOUTS + "BatchCreateRollouts": [
        lambda t: [pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=t.project)])],
    ],
    ROLLOUTS + "StreamCreateRollouts": [
        lambda t: [pb.StreamCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=t.project)])],
    ],
    ROLLOUTS + "GetRollout": [
        lambda t: [pb.GetRolloutRequest(name=t.waiting)],
        lambda t: [pb.GetRolloutRequest(name=t.running)],
    ],
    ROLLOUTS + "ListRollouts": [lambda t: [pb.ListRolloutsRequest(project=t.project)]],
    ROLLOUTS + "CancelRollouts": [
        lambda t: [pb.CancelRolloutsRequest(names=[t.waiting])],
        lambda t: [pb.CancelRolloutsRequest(names=[t.running])],
        lambda t: [pb.CancelRolloutsRequest(training_run="trainingRuns/b", project=t.project)],
        lambda t: [pb.CancelRolloutsRequest(training_run="trainingRuns/b")],
    ],
    ROLLOUTS + "RetryRollouts": [
        lambda t: [pb.RetryRolloutsRequest(names=[t.waiting], request_id="r")],
        lambda t: [pb.RetryRolloutsRequest(project=t.project, filter='state = "FAILED"')],
    ],
    ROLLOUTS + "WatchRollouts": [lambda t: [pb.WatchRolloutsRequest(project=t.project)]],
    ROLLOUTS + "GetQueueStats": [lambda t: [pb.GetQueueStatsRequest(project=t.project)]],
    LEASES + "StreamLeases": [
        lambda t: [opened(projects=[t.project])],
        lambda t: [opened(session_id=t.session)],
        lambda t: [opened(session_id=t.session, running_attempts=[t.attempt])],
        lambda t: [opened(), leases.StreamLeasesRequest(complete=leases.CompletedAttempts(results=[result_of(t)]))],
        lambda t: [opened(), leases.StreamLeasesRequest(release=leases.ReleasedAttempts(attempts=[t.attempt]))],
    ],
    LEASES + "AcquireLeases": [lambda t: [leases.AcquireLeasesRequest(session_id=t.session, max_count=1)]],
    LEASES + "RenewLeases": [lambda t: [leases.RenewLeasesRequest(session_id=t.session)]],
    LEASES + "CompleteAttempts": [lambda t: [leases.CompleteAttemptsRequest(results=[result_of(t)])]],
    LEASES + "ReleaseLeases": [
        lambda t: [leases.ReleaseLeasesRequest(session_id=t.session)],
        lambda t: [leases.ReleaseLeasesRequest(session_id=t.session, attempts=[t.attempt])],
    ],
    SPANS + "AppendSpans": [lambda t: [span_service_pb2.AppendSpansRequest(chunks=[chunk_of(t)])]],
    SPANS + "ListSpans": [
        lambda t: [span_service_pb2.ListSpansRequest(parent=t.running)],
        lambda t: [span_service_pb2.ListSpansRequest(parent=t.attempt)],
        lambda t: [span_service_pb2.ListSpansRequest(parents=[t.attempt])],
    ],
    SPANS + "StreamSpans": [
        lambda t: [span_service_pb2.StreamSpansRequest(parents=[t.running])],
        lambda t: [span_service_pb2.StreamSpansRequest(training_run="trainingRuns/b", project=t.project)],
        lambda t: [span_service_pb2.StreamSpansRequest(training_run="trainingRuns/b")],
    ],
    RESOURCES + "PublishResources": [
        lambda t: [res.PublishResourcesRequest(resources=[new_version(t, project=t.project)])],
    ],
    RESOURCES + "GetResources": [
        lambda t: [res.GetResourcesRequest(names=[t.resource])],
        lambda t: [res.GetResourcesRequest(names=[t.resource], project=t.project)],
    ],
    RESOURCES + "ListResourceVersions": [
        lambda t: [res.ListResourceVersionsRequest(parent=t.resource)],
        lambda t: [res.ListResourceVersionsRequest(project=t.project)],
    ],
    RESOURCES + "DiffResources": [
        lambda t: [res.DiffResourcesRequest(base=f"{t.resource}/versions/1", target=f"{t.resource}/versions/1")],
        lambda t: [res.DiffResourcesRequest(base=t.resource, target=t.resource, project=t.project)],
    ],
    RESOURCES + "SetAlias": [
        lambda t: [res.SetAliasRequest(name=f"{t.resource}/aliases/best", version=1)],
        lambda t: [res.SetAliasRequest(name=f"{t.resource}/aliases/best", version=1, project=t.project)],
    ],
    RESOURCES + "WatchResources": [lambda t: [res.WatchResourcesRequest(project=t.project)]],
    RUNNERS + "GetRunner": [lambda t: [runner_registry_service_pb2.GetRunnerRequest(name=f"runners/{t.session}")]],
    PROJECTS + "CreateProject": [lambda t: [prj.CreateProjectRequest(project=prj.Project(name=t.project))]],
    PROJECTS + "GetProject": [lambda t: [prj.GetProjectRequest(name=t.project)]],
    PROJECTS + "UpdateProject": [lambda t: [prj.UpdateProjectRequest(project=prj.Project(name=t.project, etag="1"))]],
    PROJECTS + "IssueToken": [
        lambda t: [prj.IssueTokenRequest(project=t.project, token_role=prj.TOKEN_ROLE_CLIENT, subject="x")],
    ],
    PROJECTS + "RevokeToken": [lambda t: [prj.RevokeTokenRequest(token_id=t.token_id)]],
    PROJECTS + "ListTokens": [lambda t: [prj.ListTokensRequest(project=t.project)]],
    NOTIFY: [
        lambda t: [
            peer_service_pb2.NotifyRequest(
                cancels=[peer_service_pb2.CancelHint(session_id=t.session, attempt=t.attempt)]
            )
        ],
    ],
    EXPORT: [lambda t: [export_of(t)]],
}

# What is asked for without a name: the same is told whether project b has things or not.
LISTINGS: dict[str, Message] = {
    ROLLOUTS + "ListRollouts": pb.ListRolloutsRequest(),
    ROLLOUTS + "GetQueueStats": pb.GetQueueStatsRequest(),
    RESOURCES + "ListResourceVersions": res.ListResourceVersionsRequest(),
    RESOURCES + "WatchResources": res.WatchResourcesRequest(),
    RUNNERS + "ListRunners": runner_registry_service_pb2.ListRunnersRequest(),
    RUNNERS + "WatchRunners": runner_registry_service_pb2.WatchRunnersRequest(),
    PROJECTS + "GetProject": prj.GetProjectRequest(),
    PROJECTS + "ListProjects": prj.ListProjectsRequest(),
    PROJECTS + "ListTokens": prj.ListTokensRequest(),
    PROJECTS + "ListRevokedTokens": prj.ListRevokedTokensRequest(),
}

A, S, R, C, V, K = Role.ADMIN, Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER, Role.ATTEMPT
# Who may call what. Whatever is not here, nobody but an administrator may.
MAY_CALL: dict[str, set[Role]] = {
    ROLLOUTS + "BatchCreateRollouts": {A, S, C},
    ROLLOUTS + "StreamCreateRollouts": {A, S, C},
    ROLLOUTS + "GetRollout": {A, S, R, C, V, K},
    ROLLOUTS + "ListRollouts": {A, S, C, V},
    ROLLOUTS + "CancelRollouts": {A, S, C},
    ROLLOUTS + "RetryRollouts": {A, S, C},
    ROLLOUTS + "WatchRollouts": {A, S, C, V},
    ROLLOUTS + "GetQueueStats": {A, S, R, C, V},
    LEASES + "StreamLeases": {A, S, R},
    LEASES + "AcquireLeases": {A, S, R},
    LEASES + "RenewLeases": {A, S, R},
    LEASES + "CompleteAttempts": {A, S, R},
    LEASES + "ReleaseLeases": {A, S, R},
    SPANS + "AppendSpans": {A, S, R, C, K},
    SPANS + "ListSpans": {A, S, R, C, V, K},
    SPANS + "StreamSpans": {A, S, R, C, V, K},
    RESOURCES + "PublishResources": {A, S, C},
    RESOURCES + "GetResources": {A, S, R, C, V},
    RESOURCES + "ListResourceVersions": {A, S, R, C, V},
    RESOURCES + "DiffResources": {A, S, C, V},
    RESOURCES + "SetAlias": {A, S, C},
    RESOURCES + "WatchResources": {A, S, R, C, V},
    RUNNERS + "ListRunners": {A, S, C, V},
    RUNNERS + "GetRunner": {A, S, C, V},
    RUNNERS + "WatchRunners": {A, S, C, V},
    PROJECTS + "CreateProject": {A},
    PROJECTS + "GetProject": {A, S, R, C, V, K},
    PROJECTS + "UpdateProject": {A},
    PROJECTS + "ListProjects": {A, S, C, V},
    PROJECTS + "IssueToken": {A},
    PROJECTS + "RevokeToken": {A},
    PROJECTS + "ListTokens": {A},
    PROJECTS + "ListRevokedTokens": {A, S},
    NOTIFY: {A, S},
    EXPORT: {A, S, R, K},
}


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
        name = AttemptName(rollout_id=uuid7(), number=1)
        return TokenSigner(SIGNING_KEY).attempt_key(
            name, project=project, lease_id=str(uuid7()), epoch=1, mode="train", ttl_s=600
        )
    return TokenSigner(SIGNING_KEY).issue(role, subject=SUBJECT, ttl_s=600, project=project)


async def furnish(store: StoreHandle, admin: Stubs) -> tuple[Things, Runner]:
    """Gives project b one of everything."""
    service = await store.stubs(token=token_of(Role.SERVICE, "projects/b"))
    secrets: dict[str, Any] = {"training_run": "trainingRuns/b", "metadata": {"secret": SECRET}}
    (running,) = await create(service, input=SECRET.encode(), **secrets)
    runner = await Runner(await store.stubs(token=token_of(Role.RUNNER, "projects/b"))).open()
    (assignment,) = await runner.take(1)
    (waiting,) = await create(service, input=SECRET.encode(), **secrets)
    version = resource_pb2.ResourceVersion(name="resources/of-b", kind="bundle", content=SECRET.encode())
    await service.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))
    issued = await admin.projects.IssueToken(
        prj.IssueTokenRequest(project="projects/b", token_role=prj.TOKEN_ROLE_CLIENT, subject=SECRET)
    )
    things = Things(
        project="projects/b",
        waiting=waiting,
        running=running,
        attempt=assignment.attempt,
        session=runner.session_id,
        resource="resources/of-b",
        token_id=issued.token_id,
    )
    chunks = service.spans.AppendSpans()
    await chunks.write(span_service_pb2.AppendSpansRequest(chunks=[chunk_of(things)]))
    assert (await chunks.read()).accepted_count == 1
    return things, runner


async def test_every_rpc_that_is_served_is_listed_here(rpcs: dict[str, Rpc]) -> None:
    assert set(PROBES) | set(LISTINGS) == set(rpcs)
    assert set(MAY_CALL) == set(rpcs)


async def test_every_role_may_call_just_what_the_table_says(
    rpcs: dict[str, Rpc], channel: grpc.aio.Channel, stubs: Stubs
) -> None:
    await create_project(stubs, "projects/a")
    refused = {
        (path, role)
        for path, rpc in rpcs.items()
        for role in Role
        if _is_refused_for_its_role(await _asked_nonsense(channel, rpc, token_of(role)))
    }
    assert refused == {(path, role) for path in rpcs for role in Role if role not in MAY_CALL.get(path, {Role.ADMIN})}


async def test_things_of_another_project_are_as_if_they_did_not_exist(
    store: StoreHandle, stubs: Stubs, rpcs: dict[str, Rpc], channel: grpc.aio.Channel, database_url: str
) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    things, runner = await furnish(store, stubs)
    none = absent()
    before = await _everything_of_b(database_url, things)
    told: list[str] = []
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
        return {
            (path, role): _leveled(await answer_of(channel, rpcs[path], request, token=token_of(role)), absent())
            for path, request in LISTINGS.items()
            for role in sorted(MAY_CALL[path] - {Role.ATTEMPT})
        }

    alone = await told()
    await create_project(stubs, "projects/b")
    things, runner = await furnish(store, stubs)
    await runner.demand(5)
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=things.token_id))
    assert await told() == alone


async def test_an_agents_key_reaches_its_own_attempt_only(
    store: StoreHandle, stubs: Stubs, rpcs: dict[str, Rpc], channel: grpc.aio.Channel
) -> None:
    runner = await Runner(stubs).open()
    names = await create(stubs, 2)
    mine, other = await runner.take(2)
    assert {mine.rollout.name, other.rollout.name} == set(names)
    none = rollout_name(uuid7())

    async def ask(rpc: str, request: Message) -> Outcome:
        return await answer_of(channel, rpcs[rpc], request, token=mine.attempt_key)

    assert not isinstance(await ask(ROLLOUTS + "GetRollout", pb.GetRolloutRequest(name=mine.rollout.name)), FulmenError)
    for name in (other.rollout.name, none):
        answer = await ask(ROLLOUTS + "GetRollout", pb.GetRolloutRequest(name=name))
        assert (type(answer).__name__, str(answer)) == ("RolloutNotFound", "There is no such rollout.")
        for parent in (name, f"{name}/attempts/1"):
            answer = await ask(SPANS + "ListSpans", span_service_pb2.ListSpansRequest(parent=parent))
            assert isinstance(answer, PermissionDenied)
    parse_attempt_name(other.attempt)


def _otlp_json(export: trace_service_pb2.ExportTraceServiceRequest) -> bytes:
    """Writes an export as OTLP/HTTP wants it: ids in hexadecimal."""
    values = MessageToDict(export)
    for resource_spans in values["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                span |= {"traceId": "ab" * 16, "spanId": "cd" * 8}
    return json.dumps(values).encode()


async def _asked_nonsense(channel: grpc.aio.Channel, rpc: Rpc, token: str) -> Outcome:
    """Sends bytes that no rpc can decode: what the role may call refuses them at once."""
    outcome = await exchange(channel, rpc, [b"\xff"], metadata=(("authorization", f"Bearer {token}"),))
    assert isinstance(outcome, PermissionDenied | ArgumentInvalid)
    return outcome


async def _asked(channel: grpc.aio.Channel, rpc: Rpc, requests: Sequence[Message], token: str) -> Outcome:
    """Returns as many answers as there are requests: that of a stream which was opened before is one."""
    return await answer_of(channel, rpc, *requests, token=token, answers=len(requests))


def _is_refused_for_its_role(outcome: Outcome) -> bool:
    return isinstance(outcome, PermissionDenied) and "may not call" in outcome.message


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
    return re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "<time>", text)


async def _everything_of_b(database_url: str, things: Things) -> dict[str, list[str]]:
    """Returns every row of the database that has to do with project b or its things."""
    connection = await asyncpg.connect(database_url)
    try:
        number = await connection.fetchval("select id from project where name = $1", things.project)
        marks = [name.partition("/")[2].partition("/")[0] for name in (things.waiting, things.running)]
        marks += [things.session, things.token_id, things.project]
        tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        found: dict[str, list[str]] = {}
        for (table,) in tables:
            rows = await connection.fetch(f"select t::text, to_jsonb(t) ->> 'project_id' from \"{table}\" t")
            kept = [row[0] for row in rows if row[1] == str(number) or any(mark in row[0] for mark in marks)]
            if table == "runner_session":
                # The session lives: when its lease ends moves on.
                kept = [re.sub(r'"[^"]*"', "<time>", row) for row in kept]
            found[table] = sorted(kept)
        for table in (f"rollout_{_today()}", "item", "issued_token", "runner_session"):
            assert found[table]
        return found
    finally:
        await connection.close()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
