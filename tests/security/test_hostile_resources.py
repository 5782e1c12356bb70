"""Nothing that is stored stops a service: it is refused before it is stored, and set aside where it is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterable
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.algorithm.v1.training_run_pb2 import PolicySpec, TrainingRun, TrainingRunState
from fulmen.algorithm.v1.training_run_service_pb2 import CreateTrainingRunRequest, ListTrainingRunsRequest
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import ArgumentInvalid, FulmenError, SettingsInvalid
from fulmen.kinds import CHECKED_KINDS, content_problems
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import failure_pb2, resource_pb2, rollout_pb2, rollout_service_pb2, usage_service_pb2
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import resource_service_pb2 as res
from fulmen_service_kit.security.tokens import Role
from tests.support.isolation import NO_SANDBOX, sandboxed
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.runner.harness import RunnerProcess, rollouts_of, spec_of
from tests.support.services import serving, target_of
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project, get

pytestmark = pytest.mark.long(short=True)

URL = "http://127.0.0.1:1/v1"
INFRA = failure_pb2.FAILURE_KIND_INFRA
FAILED = rollout_pb2.ROLLOUT_STATE_FAILED
FINAL = (FAILED, rollout_pb2.ROLLOUT_STATE_SUCCEEDED, rollout_pb2.ROLLOUT_STATE_CANCELLED)
GOOD = backend_pb2.Backend(name="backends/one", base_url=URL)


def backend(**fields: object) -> bytes:
    """Returns a backend with fields that a check refuses."""
    return backend_pb2.Backend(**({"name": "backends/evil", "base_url": URL} | fields)).SerializeToString()


def route(**fields: object) -> bytes:
    """Returns a route with fields that a check refuses."""
    whole = {"name": f"routes/{MODEL}", "targets": [route_pb2.RouteTarget(backend="backends/one")]} | fields
    return route_pb2.Route(**whole).SerializeToString()


HOSTILE = {
    "no message": ("backend", b"\xff\xff"),
    "a time after the year 9999": ("backend", backend(hold_until_time={"seconds": 10**15})),
    "a time before 1970": ("backend", backend(hold_until_time={"seconds": -(10**15)})),
    "nanoseconds that are none": ("backend", backend(hold_until_time={"nanos": -5})),
    "an unknown engine": ("backend", backend(engine=99)),
    "an unknown API": ("backend", backend(apis=[77])),
    "no address": ("backend", backend(base_url="file:///etc/passwd")),
    "an address that no resolver can encode": ("backend", backend(base_url="http://a..example/v1")),
    "a negative limit": ("backend", backend(max_in_flight=-1)),
    "a deadline without end": ("route", route(deadline={"seconds": 10**15})),
    "a deadline in the past": ("route", route(hedge_delay={"seconds": -(10**15)})),
    "no target": ("route", route(targets=[])),
    "a version below zero": ("route", route(targets=[{"backend": "backends/one", "policy_version": -(2**63)}])),
    "an unknown balancing": ("route", route(balancing=99)),
    "a route to itself": ("route", route(fallbacks=[f"routes/{MODEL}"])),
    "a policy without a path": ("policy", b"{}"),
    "a policy nested too deeply": ("policy", b"[" * 200_000),
    "an agent without an entry": (
        "agent",
        agent_spec_pb2.AgentSpec(bundle="resources/b/versions/1").SerializeToString(),
    ),
    "an agent of less than no memory": (
        "agent",
        agent_spec_pb2.AgentSpec(command={"argv": ["x"]}, limits={"memory_bytes": -1}).SerializeToString(),
    ),
    "a prompt that is no text": ("prompt", b"\xff"),
}


GIVES_ITSELF_A_REWARD = ("sh", "-c", """echo '{{"value": 1}}' >> "$FULMEN_REWARDS_FILE" """)
READABLE = {
    "backend": GOOD.SerializeToString(),
    "route": route(),
    "policy": b'{"path": "/nowhere"}',
    "agent": spec_of(command=GIVES_ITSELF_A_REWARD),
}
BUNDLE = "resources/bundle.evil0/versions/1"
HOSTILE_AGENTS = {
    "no message": b"\xff\xff",
    "nothing": b"",
    "a bundle that does not exist": spec_of(bundle="resources/bundle.none/versions/1", python="a.py:f"),
    "a bundle that is a kind of its own": spec_of(bundle="resources/agent.evil0/versions/1", python="a.py:f"),
    "a bundle that is no archive": spec_of(bundle=BUNDLE, python="a.py:f"),
    "a bundle outside": spec_of(bundle="../../etc", python="a.py:f"),
    "an entry that is no target": spec_of(bundle=BUNDLE, python="\n" * 5),
    "an entry outside": spec_of(bundle=BUNDLE, python="../../etc/passwd:f"),
    "a command of no words": spec_of(command=()),
    "a command with a zero byte": spec_of(command=("true\0",)),
    "a program that does not exist": spec_of(command=("/no/such/program",)),
    "a million words": spec_of(command=("true", *["x"] * 100_000)),
    "variables that are none": spec_of(command=("true",), environment={"A=B": "x", "": "y", "Z": "\0"}),
    "limits below zero": agent_spec_pb2.AgentSpec(
        command={"argv": ["true"]}, limits={"memory_bytes": -1, "cpu_count": -1, "process_count": -1}
    ).SerializeToString(),
    "endless output": spec_of(command=("true",), max_output_bytes=2**31 - 1),
    "an unknown isolation": spec_of(python="a:f", isolation=99),
    "a container that is none": agent_spec_pb2.AgentSpec(container={"image": "\0 -v /:/host"}).SerializeToString(),
}


def publication(kind: str, content: bytes) -> res.PublishResourcesRequest:
    """Returns a request that publishes one version."""
    names = {"route": f"resources/route.{MODEL}", "backend": "resources/backend.evil"}
    version = resource_pb2.ResourceVersion(name=names.get(kind, f"resources/{kind}.evil"), kind=kind, content=content)
    return res.PublishResourcesRequest(resources=[version])


@pytest.mark.parametrize("what", HOSTILE)
async def test_the_store_refuses_what_no_service_could_read(store: StoreHandle, what: str) -> None:
    kind, content = HOSTILE[what]
    service = await store.stubs(role=Role.SERVICE)
    with pytest.raises(ArgumentInvalid) as refused:
        await service.resources.PublishResources(publication(kind, content))
    assert all(violation.field.startswith("resources[0].") for violation in refused.value.violations)
    listed = await service.resources.ListResourceVersions(res.ListResourceVersionsRequest())
    assert not listed.resources


ADDRESSES = (
    "http://a..example/v1",
    "http://.example/v1",
    "http://../v1",
    "http://" + "a" * 64 + ".example/v1",
    "http://[::1/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1:port/v1",
    "http://127.0.0.1:0/v1",
    "http://@/v1",
    "http://:80/v1",
    "https://user:password@api.example.com/v1",
    "https://api.openai.com@evil.example/v1",
    "http://\N{FULLWIDTH LATIN SMALL LETTER A}pi.example.com/v1",
)


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_no_client_could_call_is_refused(url: str) -> None:
    assert [each.field for each in content_problems("backend", backend(base_url=url))] == ["backend.base_url"]


async def stored_anyway(stubs: Stubs, database_url: str, hostile: Iterable[tuple[str, bytes]]) -> list[str]:
    """Stores what the store would refuse, as an older release or a restored backup may have.

    Args:
        stubs: Stubs of an administrator.
        database_url: The store's database.
        hostile: Kinds and contents.

    Returns:
        The names of the versions.
    """
    names = []
    connection = await asyncpg.connect(database_url)
    try:
        for number, (kind, content) in enumerate(hostile):
            name = f"{kind}.evil{number}"
            version = resource_pb2.ResourceVersion(
                name=f"resources/{name}", kind=kind, content=READABLE.get(kind, b"x")
            )
            answer = await stubs.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))
            names += [published.name for published in answer.resources]
            await connection.execute(
                "UPDATE resource_version SET content = $1 FROM resource"
                " WHERE resource.id = resource_version.resource_id AND resource.name = $2",
                content,
                name,
            )
    finally:
        await connection.close()
    return names


async def test_a_proxy_starts_and_serves_beside_stored_bytes_that_it_cannot_read(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    of_the_proxy = [(kind, content) for kind, content in HOSTILE.values() if kind in ("route", "backend")]
    await stored_anyway(stubs, database_url, of_the_proxy)
    async with Backend() as engine, running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
        await until_loaded(proxy)
        await proxy.register("one", engine.url)
        await proxy.put_route(target("one"))
        listed = await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
        assert [each.name for each in listed.backends] == ["backends/one"]
        routes = await proxy.routes.ListRoutes(route_service_pb2.ListRoutesRequest())
        assert [each.name for each in routes.routes] == [f"routes/{MODEL}"]
        assert proxy.metric("unreadable_resources") == len(of_the_proxy)


@pytest.mark.parametrize("isolation", ["trusted", pytest.param("sandbox", marks=sandboxed)])
async def test_a_runner_fails_attempts_of_agents_that_it_cannot_read_and_runs_the_next(
    store: StoreHandle, stubs: Stubs, database_url: str, isolation: str
) -> None:
    await stored_anyway(stubs, database_url, [("bundle", b"no archive")])
    hostile = await stored_anyway(stubs, database_url, [("agent", content) for content in HOSTILE_AGENTS.values()])
    good = resource_pb2.ResourceVersion(name="resources/agent.good", kind="agent", content=READABLE["agent"])
    await stubs.resources.PublishResources(res.PublishResourcesRequest(resources=[good]))
    for _ in range(2):
        runner = RunnerProcess(
            {"store_target": store.target, "isolation": isolation, "token": store.token(Role.RUNNER)}
        )
        try:
            await runner.start()
            messages = [message for agent in hostile for message in rollouts_of(agent, [1], max_attempts=1)]
            ended = await asyncio.gather(*(outcome_of(stubs, message) for message in messages))
            assert {rollout.state for rollout in ended} == {FAILED}
            infra = {name for name, rollout in zip(HOSTILE_AGENTS, ended, strict=True) if rollout.failure_kind == INFRA}
            # Where no engine runs containers, that is said first; and what asks for more than is known gets a sandbox.
            assert infra <= {"a container that is none", *(["an unknown isolation"] if NO_SANDBOX else [])}
            (again,) = rollouts_of("resources/agent.good/versions/1", [1], max_attempts=1)
            assert (await outcome_of(stubs, again)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
            runner.send(signal.SIGTERM)
            assert await runner.exit_code() == 0
        finally:
            await runner.close()


async def outcome_of(stubs: Stubs, message: rollout_pb2.Rollout) -> rollout_pb2.Rollout:
    """Creates a rollout and returns it as it ended."""
    created = await stubs.rollouts.BatchCreateRollouts(
        rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[message])
    )
    name = created.rollouts[0].name
    async with asyncio.timeout(60):
        while (rollout := await get(stubs, name)).state not in FINAL:  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.1)
    return rollout


def policies(folder: Path) -> dict[str, object]:
    """Returns descriptions of weights that no run can start from."""
    return {
        "no object": [],
        "nothing": {},
        "a path that is a number": {"path": 7},
        "a path with a zero byte": {"path": "\0"},
        "an endless path": {"path": "x" * 100_000},
        "a kind that does not exist": {"path": str(folder), "kind": "magic"},
        "a kind that is a list": {"path": str(folder), "kind": ["full"]},
        "adapters without names": {"path": str(folder), "kind": "lora"},
        "adapters that are a number": {"path": str(folder), "kind": "lora", "adapters": 7, "base_model": None},
        "a delta of itself": {"path": str(folder), "kind": "delta", "base": "resources/policy.evil8/versions/1"},
        "a delta without a step": {"path": str(folder), "kind": "delta"},
    }


RUN_ENDED = (TrainingRunState.TRAINING_RUN_STATE_SUCCEEDED, TrainingRunState.TRAINING_RUN_STATE_FAILED)


async def test_an_algorithm_service_fails_runs_of_what_it_cannot_read_and_stays_up(
    store: StoreHandle, stubs: Stubs, database_url: str, tmp_path: Path
) -> None:
    contents = [json.dumps(each).encode() for each in policies(tmp_path).values()]
    weights = await stored_anyway(
        stubs, database_url, [("policy", content) for content in (*contents, b"\xff", b"[" * 9999)]
    )
    tasks = (b"\xff", b"", b"[" * 100_000, b"7", b'{"input": NaN}', b'{"input": {}, "input": "\\ud800"}')
    data = await stored_anyway(stubs, database_url, [("dataset", content) for content in (*tasks, b'{"input": 1}')])
    agents = await stored_anyway(stubs, database_url, [("agent", content) for content in (b"\xff", b"")])
    *bad, good = data
    runs = [TrainingRun(policy=_policy(version), inputs=_inputs(good, agents[0])) for version in weights]
    runs += [TrainingRun(policy=_policy(weights[-1]), inputs=_inputs(each, agents[1])) for each in bad]
    for _ in range(2):
        async with (
            serving("algorithm", store, tmp_path / "state", roles=True) as parts,
            open_channel(target_of(parts), token=store.token(Role.CLIENT)) as channel,
        ):
            service = TrainingRunServiceStub(channel)
            for run in runs:
                run.algorithm = "evaluate"
                with contextlib.suppress(ArgumentInvalid, SettingsInvalid):
                    await service.CreateTrainingRun(CreateTrainingRunRequest(training_run=run))
            async with asyncio.timeout(120):
                while not await all_ended(service):  # noqa: ASYNC110  # state of the service
                    await asyncio.sleep(0.1)


def _policy(version: str) -> PolicySpec:
    return PolicySpec(name=version.split("/")[1].removeprefix("policy."), version=version)


def _inputs(tasks: str, agent: str) -> dict[str, str]:
    return {"validation_tasks": tasks, "agent": agent}


async def all_ended(service: TrainingRunServiceStub) -> bool:
    """Returns True if every run has ended, and none with an error that the service did not foresee."""
    listed = await service.ListTrainingRuns(ListTrainingRunsRequest())
    unforeseen = [run for run in listed.training_runs if "unexpected" in run.failure_message.lower()]
    assert unforeseen == []
    return all(run.state in RUN_ENDED for run in listed.training_runs)


async def test_a_project_whose_row_cannot_be_read_stops_neither_the_store_nor_others(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    await create_project(stubs, "projects/broken")
    connection = await asyncpg.connect(database_url)
    await connection.execute("UPDATE project SET rules = $1, model_limits = $1 WHERE name = 'projects/broken'", b"\xff")
    await connection.close()
    listed = await stubs.projects.ListProjects(prj.ListProjectsRequest())
    assert [each.name for each in listed.projects] == ["projects/broken", "projects/default"]
    assert await stubs.usage.SyncUsage(usage_service_pb2.SyncUsageRequest(instance_id="one", sequence=1))
    for project in ("projects/broken", "projects/default"):
        await create(stubs, project=project)
    runner = await Runner(stubs).open()
    assert len(await runner.take(2)) == 2


async def until_loaded(proxy: RunningProxy) -> None:
    """Waits until the proxy has its table."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(FulmenError):
                await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
                return
            await asyncio.sleep(0.05)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([*CHECKED_KINDS, "other"]), content=st.binary(max_size=200))
def test_a_check_of_any_bytes_ends_in_a_list_of_problems(kind: str, content: bytes) -> None:
    assert isinstance(content_problems(kind, content), list)
