"""Clients in other languages, made from the .proto files alone, do everything against real services.

Every test runs with the program of each language; what they print and how they end is the same in all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import parse_runner_name
from fulmen.store.v1 import (
    failure_pb2,
    lease_pb2,
    lease_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    span_service_pb2,
)
from fulmen_service_kit.security.tokens import Role
from tests.support.certificates import Authority
from tests.support.clients import LANGUAGES, Client, built
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, running_proxy, target
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs, create, get, running_store

pytestmark = pytest.mark.timeout(420)  # the first test of a language builds its program

VECTORS = Path(__file__).parents[2] / "protos" / "testdata" / "exchange"
TASK = b'{"question": "6*7="}'
APPLIED = "COMPLETION_STATUS_APPLIED"
SUCCEEDED = "ROLLOUT_STATE_SUCCEEDED"
ATTEMPT_SUCCEEDED = {
    "state": "ATTEMPT_STATE_SUCCEEDED",
    "failure_kind": "FAILURE_KIND_UNSPECIFIED",
    "rewards": [1],
}


def marks_of(language: str) -> list[pytest.MarkDecorator]:
    """Leaves the languages that have to be compiled to the long form, each in a group of its own."""
    group = pytest.mark.xdist_group(f"client-{language}")
    return [group] if language == "node" else [group, pytest.mark.long(short=True)]


EVERY = [pytest.param(each, marks=marks_of(each)) for each in LANGUAGES]
in_every_language = pytest.mark.parametrize("program", EVERY, indirect=True)
"""What the gate tries in Java, too: a command there takes more than a second of a processor. The rest of it is long."""

WAYS = {"drained": lambda language: [] if language == "node" else [pytest.mark.long], "cut off": lambda language: []}
"""How a runner loses its store, and marks: of a drain that of one language is enough for the gate."""
MOVES = [
    pytest.param(language, way, marks=[*marks_of(language), *marks(language)])
    for language in LANGUAGES
    for way, marks in WAYS.items()
]


@pytest.fixture(
    params=[
        pytest.param(each, marks=[*marks_of(each), *([pytest.mark.long] if each == "java" else [])])
        for each in LANGUAGES
    ]
)
def program(request: pytest.FixtureRequest) -> Client:
    """Returns the program of one language, which nobody told yet where anything is."""
    return Client(program=built(request.param))


@pytest.fixture
def lease_ttl_s() -> float:
    """Returns how long a session lives without a sign of life: longer than any pause of a busy machine."""
    return 60.0


@pytest.fixture
async def store(database_url: str, lease_ttl_s: float) -> AsyncIterator[StoreHandle]:
    """Yields a store."""
    async with running_store(database_url, lease_ttl_s=lease_ttl_s) as handle:
        yield handle


@pytest.fixture
async def stubs(store: StoreHandle) -> Stubs:
    """Returns an administrator's stubs."""
    return await store.stubs()


@pytest.fixture
def client(program: Client, store: StoreHandle) -> Client:
    """Returns the program with the token of a trainer, which creates rollouts and reads the feed."""
    return program.with_environment(FULMEN_STORE_TARGET=store.target, FULMEN_TOKEN=store.token(Role.CLIENT))


@pytest.fixture
def runner(program: Client, store: StoreHandle, tmp_path: Path) -> Client:
    """Returns the program with the token of a runner, in a file."""
    token_file = tmp_path / "runner.token"
    token_file.write_text(store.token(Role.RUNNER) + "\n")
    return program.with_environment(FULMEN_STORE_TARGET=store.target, FULMEN_TOKEN_FILE=str(token_file))


def events(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Returns the lines that tell of an event."""
    return [line for line in lines if line["event"] == event]


async def names_of_spans(stubs: Stubs, attempt: str) -> list[str]:
    """Returns the names of the spans that the store has of an attempt."""
    response = await stubs.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=attempt))
    return sorted(Span.FromString(one.span.otlp_span).name for one in response.spans)


@in_every_language
async def test_a_group_goes_from_its_creation_through_model_calls_to_the_feed(
    client: Client, runner: Client, store: StoreHandle, stubs: Stubs
) -> None:
    created = await client.lines("create", "--count", 3, "--group-id", "g1", "--input", TASK.decode())
    names = sorted(line["rollout"] for line in created)
    assert [line["state"] for line in created] == ["ROLLOUT_STATE_QUEUED"] * 3

    async with (
        Backend(script=lambda body: f"{body['messages'][-1]['content']}42") as backend,
        running_proxy(store.target, signing_key=SIGNING_KEY) as proxy,
    ):
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        asking = runner.with_environment(FULMEN_LLM_PROXY_TARGET=f"127.0.0.1:{proxy.parts.server.port}")
        worked = await asking.lines("run", "--count", 3, "--slots", 2, "--model", MODEL)
        attempts = [line["attempt"] for line in events(worked, "assigned")]
        for attempt in attempts:
            await proxy.flush(attempt)

    assert worked[0] == {"event": "opened", "runner": worked[0]["runner"], "resumed": False, "lease_ttl_s": 60}
    assert sorted(attempts) == [f"{name}/attempts/1" for name in names]
    assert {(line["attempt"], line["status"]) for line in events(worked, "acknowledged")} == {
        (attempt, APPLIED) for attempt in attempts
    }
    for attempt in attempts:
        assert await names_of_spans(stubs, attempt) == [f"chat {MODEL}", "solve"]

    (group,) = await client.lines("watch")
    output = json.dumps({"answer": "6*7=42"}, separators=(",", ":"))
    expected = [
        {
            "rollout": name,
            "state": SUCCEEDED,
            "attempts": [{"attempt": f"{name}/attempts/1", "output": output, **ATTEMPT_SUCCEEDED}],
        }
        for name in names
    ]
    assert group == {"group_id": "g1", "cursor": group["cursor"], "rollouts": expected}


async def test_a_repeated_creation_creates_nothing(client: Client, stubs: Stubs) -> None:
    first = await client.lines("create", "--count", 2, "--request-id", "r1")
    assert await client.lines("create", "--count", 2, "--request-id", "r1") == first
    stats = await stubs.rollouts.GetQueueStats(rollout_service_pb2.GetQueueStatsRequest())
    assert stats.queued_count == 2


async def test_the_feed_goes_on_behind_the_cursor(client: Client, runner: Client, stubs: Stubs) -> None:
    names = await create(stubs, 3, input=TASK)
    await runner.lines("run", "--count", 3)
    (first,) = await client.lines("watch")
    rest = await client.lines("watch", "--count", 2, "--cursor", first["cursor"])
    assert sorted(group["group_id"] for group in [first, *rest]) == sorted(names)


async def test_a_group_larger_than_a_message_is_read_by_a_client_without_options(
    client: Client, runner: Client, stubs: Stubs
) -> None:
    task = TASK.ljust(256 * 1024)
    names = await create(stubs, 20, input=task, group_id="large", group_size=20)
    await runner.lines("run", "--count", 20, "--slots", 4)
    (after,) = await create(stubs, input=TASK)
    await runner.lines("run")
    large, following = await client.lines("watch", "--count", 2)
    assert (large["group_id"], following["group_id"]) == ("large", after)
    assert [line["rollout"] for line in large["rollouts"]] == sorted(names)
    assert {line["attempts"][0]["output"] for line in large["rollouts"]} == {'{"answer":"42"}'}


@in_every_language
async def test_a_runner_takes_no_more_than_it_has_credits_for(runner: Client, stubs: Stubs) -> None:
    names = await create(stubs, 5, input=TASK)
    lines = await runner.lines("run", "--count", 4, "--slots", 2, "--work-s", 0.2)

    most = held = 0
    for line in lines:
        held += {"assigned": 1, "acknowledged": -1}.get(line["event"], 0)
        most = max(most, held)
    assert most == 2
    states = sorted([(await get(stubs, name)).state for name in names])
    assert states == [rollout_pb2.ROLLOUT_STATE_QUEUED, *[rollout_pb2.ROLLOUT_STATE_SUCCEEDED] * 4]


async def test_a_rollout_waits_for_a_runner_with_the_label_that_it_requires(client: Client, runner: Client) -> None:
    (created,) = await client.lines("create", "--label", "arm=left")
    async with runner.start("run", "--label", "arm=right") as other:
        await other.expect("opened")
        lines = await runner.lines("run", "--label", "arm=left")
    assert events(lines, "assigned")[0]["attempt"] == f"{created['rollout']}/attempts/1"


@pytest.mark.parametrize("lease_ttl_s", [2.0])
async def test_renewals_keep_an_attempt_that_runs_longer_than_the_lease(runner: Client, stubs: Stubs) -> None:
    (name,) = await create(stubs, input=TASK)
    lines = await runner.lines("run", "--work-s", 4.5)
    assert [line["event"] for line in lines] == ["opened", "assigned", "acknowledged"]
    (attempt,) = (await get(stubs, name)).attempts
    assert attempt.final


async def test_a_cancelled_attempt_is_stopped_and_reported(runner: Client, stubs: Stubs) -> None:
    (name,) = await create(stubs, input=TASK)
    async with runner.start("run", "--work-s", 300) as running:
        await running.expect("assigned")
        await stubs.rollouts.CancelRollouts(rollout_service_pb2.CancelRolloutsRequest(names=[name]))
        done = await running.end()
    assert [line["event"] for line in done.lines] == ["opened", "assigned", "cancel", "acknowledged"]
    assert done.lines[-1]["status"] == APPLIED
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
    assert rollout.attempts[0].failure_kind == failure_pb2.FAILURE_KIND_CANCELLED


@in_every_language
@pytest.mark.parametrize("lease_ttl_s", [2.0])
async def test_a_lost_lease_stops_the_attempt_and_nothing_is_reported(
    runner: Client, stubs: Stubs, database_url: str
) -> None:
    (name,) = await create(stubs, input=TASK)
    async with runner.start("run", "--work-s", 300) as running, running_store(database_url) as other:
        session = str(parse_runner_name((await running.expect("opened"))["runner"]))
        attempt = (await running.expect("assigned"))["attempt"]
        stopped = lease_pb2.AttemptResult(
            attempt=attempt, lease_id=session, epoch=1, failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR
        )
        elsewhere = (await other.stubs()).leases
        await elsewhere.CompleteAttempts(lease_service_pb2.CompleteAttemptsRequest(results=[stopped]))
        done = await running.end()
    assert (done.status, [line["event"] for line in done.lines]) == (0, ["opened", "assigned", "lease_lost"])
    assert (await get(stubs, name)).failure_kind == failure_pb2.FAILURE_KIND_AGENT_ERROR


async def test_an_attempt_ends_at_its_time_limit(runner: Client, stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(max_attempts=1)
    policy.attempt_timeout.seconds = 1
    (name,) = await create(stubs, input=TASK, policy=policy)
    await runner.lines("run", "--work-s", 300)
    assert (await get(stubs, name)).attempts[0].failure_kind == failure_pb2.FAILURE_KIND_TIMEOUT


async def test_what_the_model_refuses_fails_the_attempt_with_its_reason(
    runner: Client, store: StoreHandle, stubs: Stubs
) -> None:
    (name,) = await create(stubs, input=TASK)
    async with running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
        await proxy.register("one", "http://127.0.0.1:1")  # returns when the proxy knows its routes
        asking = runner.with_environment(FULMEN_LLM_PROXY_TARGET=f"127.0.0.1:{proxy.parts.server.port}")
        await asking.lines("run", "--model", "unheard-of")
    (attempt,) = (await get(stubs, name)).attempts
    assert attempt.failure_kind == failure_pb2.FAILURE_KIND_AGENT_ERROR
    assert "404" in attempt.failure_message


@pytest.mark.parametrize(("program", "way"), MOVES, indirect=["program"])
async def test_a_runner_takes_its_session_and_attempt_to_the_next_store(
    runner: Client, store: StoreHandle, stubs: Stubs, database_url: str, way: str
) -> None:
    (name,) = await create(stubs, input=TASK)
    # Longer than the next store takes to start on a busy machine.
    async with runner.start("run", "--work-s", 8) as running:
        await running.expect("assigned")
        if way == "drained":
            drained = asyncio.create_task(store.parts.drain())
            await running.expect("drain")
            await drained
        await store.parts.server.server.stop(grace=0)
        async with running_store(database_url, port=store.port) as after:
            done = await running.end()
            rollout = await get(await after.stubs(), name)
    first, *again = events(done.lines, "opened")
    assert {(line["runner"], line["resumed"]) for line in again} == {(first["runner"], True)}
    assert [line["status"] for line in events(done.lines, "acknowledged")] == [APPLIED]
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    assert len(rollout.attempts) == 1


@in_every_language
@pytest.mark.parametrize("lease_ttl_s", [2.0])
async def test_a_runner_whose_session_has_ended_begins_another(runner: Client, stubs: Stubs) -> None:
    await create(stubs, input=TASK)
    async with runner.start("run", "--work-s", 300) as running:
        first = await running.expect("opened")
        await running.expect("assigned")
        await stubs.leases.ReleaseLeases(lease_service_pb2.ReleaseLeasesRequest(runner=first["runner"]))
        assert (await running.expect("session_ended"))["runner"] == first["runner"]
        second = await running.expect("opened")
        assert (await running.expect("assigned"))["attempt"].endswith("/attempts/2")
    assert (second["resumed"], second["runner"] == first["runner"]) == (False, False)


@in_every_language
async def test_a_watch_outlives_a_restart_of_the_store(
    client: Client, runner: Client, store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    names = await create(stubs, input=TASK)
    await runner.lines("run")
    async with client.start("watch", "--count", 2) as watching:
        first = await watching.next()
        await store.parts.server.server.stop(grace=0)
        async with running_store(database_url, port=store.port) as after:
            names += await create(await after.stubs(), input=TASK)
            await runner.lines("run")
            done = await watching.end()
    assert (done.status, done.lines[0]) == (0, first), done
    assert [group["group_id"] for group in done.lines] == names


async def test_a_refused_token_is_a_typed_error(client: Client) -> None:
    done = await client.with_environment(FULMEN_TOKEN="not-a-token").run("create")
    assert (done.status, done.lines) == (1, [])
    assert done.error == {
        "code": "UNAUTHENTICATED",
        "reason": "TOKEN_INVALID",
        "message": "The token is malformed or was not issued by this deployment.",
        "metadata": {"problem": "forged"},
    }


@pytest.mark.parametrize("command", ["create", "run", "watch"])
async def test_nothing_waits_longer_than_its_deadline(client: Client, runner: Client, command: str) -> None:
    caller = runner if command == "run" else client
    if command == "create":
        caller = caller.with_environment(FULMEN_STORE_TARGET="127.0.0.1:1")
    done = await caller.run(command, "--deadline-s", 1)
    assert done.status == 1
    assert done.error["code"] in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}


async def test_a_wrong_command_line_is_told(program: Client) -> None:
    for arguments in (["dance"], ["create", "--colour", "red"], ["create", "--count", "many"], []):
        done = await program.run(*arguments)
        assert (done.status, done.lines, done.error["code"]) == (2, [], "USAGE")


@in_every_language
async def test_calls_go_over_tls_with_a_certificate_of_the_caller(
    program: Client, database_url: str, tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    own, strange = ours.issue("client"), theirs.issue("stranger")
    async with running_store(
        database_url, **ours.issue("store").settings(), tls_client_ca_file=str(ours.file)
    ) as store:
        trusting = program.with_environment(
            FULMEN_STORE_TARGET=f"localhost:{store.port}",
            FULMEN_TOKEN=store.token(Role.CLIENT),
            FULMEN_TLS_CA_FILE=str(ours.file),
        )
        known = trusting.with_environment(
            FULMEN_TLS_CERTIFICATE_FILE=str(own.certificate), FULMEN_TLS_KEY_FILE=str(own.key)
        )
        stranger = trusting.with_environment(
            FULMEN_TLS_CERTIFICATE_FILE=str(strange.certificate), FULMEN_TLS_KEY_FILE=str(strange.key)
        )
        suspicious = known.with_environment(FULMEN_TLS_CA_FILE=str(theirs.file))
        assert len(await known.lines("create")) == 1
        for refused in (trusting, stranger, suspicious):
            done = await refused.run("create", "--deadline-s", 1)
            assert (done.status, done.lines) == (1, [])
            assert done.error["code"] in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


@in_every_language
async def test_every_golden_vector_is_read_or_refused_as_it_should_be(program: Client) -> None:
    files = sorted(VECTORS.glob("*.json"))
    expected = []
    for file in files:
        golden = json.loads(file.read_text())
        counts = {"decoded": len(golden["cases"]), "refused": len(golden["refused"]["payloads"])}
        expected.append({"codec": golden["codec"], **counts})
    assert await program.lines("vectors", *files) == expected


@pytest.mark.parametrize("damage", ["another value", "a good one refused"])
async def test_a_vector_that_is_read_otherwise_is_told(program: Client, tmp_path: Path, damage: str) -> None:
    golden = json.loads((VECTORS / "topk.json").read_text())
    case = golden["cases"]["few"]
    if damage == "another value":
        case["decoded"][0][1] += 2**-20
    else:
        golden["refused"] = {**golden["refused"], "size": case["size"], "payloads": {damage: case["payload"]}}
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(golden))
    done = await program.run("vectors", file)
    assert (done.status, done.lines, done.error["code"]) == (1, [], "FAILED")
    assert done.error["message"].startswith("topk: ")
