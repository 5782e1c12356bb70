"""Whatever is sent to any rpc or to the OTLP port, the store lives on, answers by an error of the catalogue or well, and betrays nothing.

The seed is printed; FULMEN_TEST_SEED repeats a run, and FULMEN_TEST_SOAK=20 makes it as many times longer.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fulmen.errors import FulmenError, InternalError, MessageTooLarge
from fulmen.ids import runner_name
from fulmen.store.v1 import project_service_pb2, resource_pb2, resource_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support import soak
from tests.support.store.rpcs import Outcome, Rpc, exchange, listed_rpcs
from tests.support.store.running import LIMIT_S, SIGNING_KEY, Runner, StoreHandle, create, create_project, running_store

SEED = soak.seed()
# Long enough for any answer that is not waited for; a watch that was opened well is left then.
PATIENCE_S = 0.25
SECRET = "only-b-knows"
MAX_DEPTH = 4
MESSAGE_LIMIT_BYTES = 64 * 1024
INTERNAL_WORDS = ("Traceback", "asyncpg", "psycopg", "postgresql://", "/src/", ".py", "select ", "insert into", "0x")

bounded = settings(
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running store with two projects, called from a test that is not a coroutine."""

    loop: asyncio.AbstractEventLoop = field(repr=False)
    channel: grpc.aio.Channel = field(repr=False)
    rpcs: dict[str, Rpc] = field(repr=False)
    http: aiohttp.ClientSession = field(repr=False)
    names: Sequence[str]

    def post(self, body: bytes, headers: dict[str, str], path: str = "/v1/traces") -> int:
        """Posts to the OTLP port, checks what comes back and returns the status."""

        async def post() -> tuple[int, str]:
            async with asyncio.timeout(LIMIT_S), self.http.post(path, data=body, headers=headers) as answer:
                return answer.status, (await answer.read()).decode("latin-1")

        status, told = self.loop.run_until_complete(post())
        assert status not in (500, 501, 502), (status, told)
        assert not any(word in told for word in (*INTERNAL_WORDS, SECRET)), told
        return status

    def send(
        self,
        rpc: Rpc,
        payloads: Sequence[bytes],
        metadata: Sequence[tuple[str, Any]],
        *,
        timeout_s: float = PATIENCE_S,
    ) -> Outcome:
        """Sends raw messages and checks what comes back."""
        outcome = self.loop.run_until_complete(
            exchange(self.channel, rpc, payloads, metadata=metadata, answers=len(payloads), timeout_s=timeout_s)
        )
        check(outcome)
        return outcome


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """Yields a store that has something of everything in the projects a and b."""
    from tests.support.postgres import shared_server

    server = shared_server()
    dsn = server.fresh_database()
    print(f"{soak.SEED_VARIABLE}={SEED}")
    with asyncio.Runner() as runner:
        context = running_store(dsn, max_message_bytes=MESSAGE_LIMIT_BYTES, auth_failures_per_minute=0)
        handle = runner.run(context.__aenter__())
        try:
            channel, rpcs, names = runner.run(_furnished(handle))
            http = runner.run(_opened(handle))
            yield Target(loop=runner.get_loop(), channel=channel, rpcs=rpcs, http=http, names=names)
            runner.run(_still_serves(handle))
        finally:
            runner.run(context.__aexit__(None, None, None))
    server.drop(dsn)


async def _furnished(handle: StoreHandle) -> tuple[grpc.aio.Channel, dict[str, Rpc], list[str]]:
    admin = await handle.stubs()
    names = ["projects/default", "projects/*", "projects/default/rollouts/", "resources/x", "latest", "trainingRuns/x"]
    for project in ("projects/a", "projects/b"):
        await create_project(admin, project)
        created = await create(admin, 2, project=project, input=SECRET.encode() if project == "projects/b" else b"")
        runner = await Runner(await handle.stubs(role=Role.RUNNER, project=project)).open()
        (assignment,) = await runner.take(1)
        version = resource_pb2.ResourceVersion(
            name="resources/x", kind="bundle", project=project, content=SECRET.encode() if project[-1] == "b" else b"a"
        )
        await admin.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
        issued = await admin.projects.IssueToken(
            project_service_pb2.IssueTokenRequest(
                project=project,
                role=project_service_pb2.TOKEN_ROLE_CLIENT,
                subject=SECRET if project[-1] == "b" else "a",
            )
        )
        names += [project, *created, assignment.attempt, runner.session_id, runner_name(runner.session_id)]
        names += ["resources/x/versions/1", "resources/x/aliases/best", issued.token_id]
    channel = await handle.stack.enter_async_context(grpc.aio.insecure_channel(handle.target))
    return channel, await listed_rpcs(channel), names


async def _opened(handle: StoreHandle) -> aiohttp.ClientSession:
    base = f"http://127.0.0.1:{handle.parts.ports['http_port']}"
    return await handle.stack.enter_async_context(aiohttp.ClientSession(base))


async def _still_serves(handle: StoreHandle) -> None:
    stubs = await handle.stubs()
    assert await create(stubs)
    await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())


def check(outcome: Outcome) -> None:
    """Fails for what must not be answered."""
    if isinstance(outcome, FulmenError):
        assert not isinstance(outcome, InternalError), repr(outcome)
        told = f"{outcome.message} {outcome.metadata} {outcome.violations}"
        assert not any(word in outcome.message for word in INTERNAL_WORDS), told
    else:
        told = "".join(message.SerializeToString().decode("latin-1") for message in outcome)
    assert SECRET not in told


def bearer(role: Role) -> tuple[str, str]:
    """Returns the metadata of a token of project a."""
    token = TokenSigner(SIGNING_KEY).issue(role, subject="fuzz", ttl_s=600, project="projects/a")
    return "authorization", f"Bearer {token}"


EDGES = {
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2, 7, 1000, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 2, 60, 10**10, 2**62, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 10**18, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, 1.5, -1.0, float("nan"), float("inf"), 1e308],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, 1.5, float("nan"), float("inf")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
}
TEXTS = ["", "x", "a" * 129, "nul \0", "é☃", "😀" * 40, "%s%n{}", "'; drop table item; --", "../../etc", "a=b"]


def scalar(field: FieldDescriptor, names: Sequence[str]) -> st.SearchStrategy[Any]:
    """Returns values for a field that is no message, edges among them."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.sampled_from([99, -1])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from([*names, *names, *TEXTS]) | st.text(max_size=20)
    return st.sampled_from(EDGES[field.cpp_type])


def fill(draw: st.DrawFn, message: Message, names: Sequence[str], depth: int) -> None:
    """Sets some fields of a message."""
    fields = list(message.DESCRIPTOR.fields)
    chosen = st.lists(st.sampled_from(fields), unique_by=lambda one: one.number, max_size=6) if fields else st.just([])
    for each in draw(chosen):
        is_message = each.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if is_message and depth == 0:
            continue
        if each.is_repeated if hasattr(each, "is_repeated") else each.label == FieldDescriptor.LABEL_REPEATED:
            values = getattr(message, each.name)
            for _ in range(draw(st.integers(0, 3))):
                if not is_message:
                    values.append(draw(scalar(each, names)))
                elif each.message_type.GetOptions().map_entry:
                    _fill_map(draw, values, each, names)
                else:
                    fill(draw, values.add(), names, depth - 1)
        elif is_message:
            inner = getattr(message, each.name)
            inner.SetInParent()
            fill(draw, inner, names, depth - 1)
        else:
            setattr(message, each.name, draw(scalar(each, names)))


def _fill_map(draw: st.DrawFn, values: Any, field: FieldDescriptor, names: Sequence[str]) -> None:
    key_field, value_field = field.message_type.fields
    if value_field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        values[draw(scalar(key_field, names))] = draw(scalar(value_field, names))


@st.composite
def filled(draw: st.DrawFn, message: Message, names: Sequence[str]) -> Message:
    """Sets some fields of a given message."""
    fill(draw, message, names, MAX_DEPTH + 2)
    return message


@st.composite
def calls(draw: st.DrawFn, target: Target) -> tuple[Rpc, list[Message]]:
    """Draws an rpc and the messages of one call."""
    rpc = target.rpcs[draw(st.sampled_from(sorted(target.rpcs)))]
    messages = []
    for _ in range(draw(st.integers(1, 3)) if rpc.method.client_streaming else 1):
        message = rpc.request_class()
        fill(draw, message, target.names, MAX_DEPTH)
        messages.append(message)
    return rpc, messages


@st.composite
def mutations(draw: st.DrawFn, payload: bytes) -> bytes:
    """Draws what became of bytes on their way: cut, changed, doubled, or random."""
    changed = bytearray(payload)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(changed)))
        match draw(st.sampled_from(["cut", "change", "insert", "double", "random"])):
            case "cut":
                del changed[place:]
            case "change":
                changed[place : place + 1] = draw(st.binary(min_size=1, max_size=2))
            case "insert":
                changed[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "double":
                changed += changed[place:]
            case "random":
                changed = bytearray(draw(st.binary(max_size=60)))
    return bytes(changed[:4096])


roles = st.sampled_from([Role.ADMIN, Role.ADMIN, Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER])


@seed(SEED)
@settings(bounded, max_examples=350 * soak.SOAK)
@given(data=st.data(), role=roles)
def test_no_message_of_the_contract_breaks_an_rpc(target: Target, data: st.DataObject, role: Role) -> None:
    rpc, messages = data.draw(calls(target))
    target.send(rpc, [message.SerializeToString() for message in messages], [bearer(role)])


@seed(SEED)
@settings(bounded, max_examples=250 * soak.SOAK)
@given(data=st.data(), role=roles)
def test_no_bytes_break_an_rpc(target: Target, data: st.DataObject, role: Role) -> None:
    rpc, messages = data.draw(calls(target))
    payloads = [data.draw(mutations(message.SerializeToString())) for message in messages]
    target.send(rpc, payloads, [bearer(role)])


header_text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=120)
good_token = bearer(Role.ADMIN)[1]
authorizations = st.one_of(
    header_text,
    header_text.map(lambda text: f"Bearer {text}"),
    st.integers(0, len(good_token)).map(lambda place: good_token[:place]),
    st.tuples(st.integers(7, len(good_token) - 1), st.sampled_from("aA0._-= ")).map(
        lambda change: good_token[: change[0]] + change[1] + good_token[change[0] + 1 :]
    ),
    st.just(good_token.replace("Bearer", "bearer")),
)
other_headers = st.lists(
    st.tuples(
        st.sampled_from(["traceparent", "tracestate", "baggage", "x-anything", "grpc-trace"]),
        header_text | st.just("00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
    )
    | st.tuples(st.sampled_from(["grpc-trace-bin", "x-bin"]), st.binary(max_size=40)),
    max_size=3,
)


@seed(SEED)
@settings(bounded, max_examples=150 * soak.SOAK)
@given(data=st.data(), authorization=st.none() | authorizations, others=other_headers)
def test_no_metadata_breaks_an_rpc(
    target: Target, data: st.DataObject, authorization: str | None, others: list[tuple[str, Any]]
) -> None:
    rpc = target.rpcs[data.draw(st.sampled_from(sorted(target.rpcs)))]
    metadata = others + ([("authorization", authorization)] if authorization is not None else [])
    target.send(rpc, [b""], metadata)


EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
content_types = st.sampled_from(
    ["application/x-protobuf", "application/json", "application/json; charset=utf-8", "text/plain", "", "x"]
)
encodings = st.sampled_from(["", "", "", "gzip", "identity", "br", "gzip, gzip"])


@seed(SEED)
@settings(bounded, max_examples=120 * soak.SOAK)
@given(data=st.data(), role=roles, kind=content_types, encoding=encodings)
def test_nothing_breaks_the_otlp_port(
    target: Target, data: st.DataObject, role: Role, kind: str, encoding: str
) -> None:
    export = target.rpcs[EXPORT].request_class()
    data.draw(filled(export, target.names))
    body = MessageToJson(export).encode() if "json" in kind else export.SerializeToString()
    if data.draw(st.booleans()):
        body = data.draw(mutations(body))
    if encoding == "gzip" and data.draw(st.booleans()):
        body = gzip.compress(body)
    name, token = bearer(role) if data.draw(st.integers(0, 9)) else ("authorization", data.draw(authorizations))
    headers = {"content-type": kind, name: token.strip()} | ({"content-encoding": encoding} if encoding else {})
    assert target.post(body, headers) in (200, 400, 401, 403, 413, 415)


def test_what_is_too_large_is_refused_by_every_rpc(target: Target) -> None:
    for path, rpc in target.rpcs.items():
        outcome = target.send(
            rpc, [b"\x0a" + b"\xff" * (MESSAGE_LIMIT_BYTES + 1)], [bearer(Role.ADMIN)], timeout_s=LIMIT_S
        )
        assert isinstance(outcome, MessageTooLarge), (path, outcome)


def test_a_thousand_problems_are_told_in_an_answer_that_arrives(target: Target) -> None:
    rpc = target.rpcs["/fulmen.store.v1.RolloutService/BatchCreateRollouts"]
    bad = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(name="☃" * 20, priority=999)] * 600)
    outcome = target.send(rpc, [bad.SerializeToString()], [bearer(Role.ADMIN)], timeout_s=LIMIT_S)
    assert isinstance(outcome, FulmenError)
    assert outcome.reason == "ARGUMENT_INVALID"
    assert len(outcome.violations) > 10
    assert "more problems" in outcome.violations[-1].description
