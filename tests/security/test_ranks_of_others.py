"""A machine joins the run of its token and no other, if it is like the service, and sees its folders as the service does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import engine_service_pb2, training_run_pb2, training_run_service_pb2, weight_service_pb2
from fulmen.algorithm.v1 import rank_service_pb2 as pb
from fulmen.algorithm.v1.engine_service_pb2_grpc import EngineServiceStub
from fulmen.algorithm.v1.rank_service_pb2_grpc import RankServiceStub
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import (
    ArgumentInvalid,
    FulmenError,
    PermissionDenied,
    TokenInvalid,
    TrainingRunNotFound,
    TrainingRunStateInvalid,
    Unavailable,
)
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_algorithm.cluster.wire import unseen_folders
from fulmen_algorithm.trainers.calls import build
from fulmen_service_kit.security.tokens import RUN_ROLES, Role
from tests.support.algorithm.model_folders import model_folder
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle, Stubs, create_project, run_token

A, B = "projects/a", "projects/b"
LIMIT_S = 30.0
JOINED = {"kind": "ddp", "ranks": 2, "cluster": "machines"}
DEMONSTRATION = b'{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'


def hello(run: str, **fields: Any) -> pb.RanksHello:
    return pb.RanksHello(**{"training_run": run, "node": "gpu-7", "ranks": 2, "cpus": 2, "build": build(), **fields})


class Machine:
    """A machine that says what a test wants, and what it is answered."""

    def __init__(self, service: Service, token: str, said: pb.RanksHello) -> None:
        self.started: list[pb.StartRanks] = []
        self._service, self._token, self._said = service, token, said
        self._say: asyncio.Queue[pb.JoinRanksRequest] = asyncio.Queue()

    async def joins(self, *, says: Sequence[pb.JoinRanksRequest] = ()) -> FulmenError | None:
        """Joins; returns the error with which the stream ends, and None if it is still open when it has said everything."""
        self._say.put_nowait(pb.JoinRanksRequest(hello=self._said))
        stub = RankServiceStub(await self._service.channel(self._token))
        stream = stub.JoinRanks(self._each())
        try:
            async with asyncio.timeout(LIMIT_S):
                look = (await anext(aiter(stream))).look
                unseen = unseen_folders(dict(look.folders))
                for message in (pb.JoinRanksRequest(seen=pb.FoldersSeen(unseen=unseen)), *says):
                    self._say.put_nowait(message)
                if says:
                    async for message in stream:
                        self.started.append(message.start)
        except FulmenError as error:
            return error
        finally:
            stream.cancel()
        return None

    async def _each(self) -> AsyncIterator[pb.JoinRanksRequest]:
        while True:
            yield await self._say.get()


class Service:
    """The algorithm service, as its callers reach it."""

    def __init__(
        self, target: str, stack: AsyncExitStack, store: StoreHandle, folder: Path, *, revocations: Any
    ) -> None:
        self.revocations = revocations
        self._target, self._stack, self._store, self._folder = target, stack, store, folder

    async def channel(self, token: str) -> Any:
        return await self._stack.enter_async_context(open_channel(self._target, token=token))

    async def joins(self, token: str, run: str, **fields: Any) -> FulmenError | None:
        return await Machine(self, token, hello(run, **fields)).joins()

    async def run(self, name: str, parallel: Mapping[str, Any]) -> str:
        """Creates a run of project a, which nobody executes."""
        policy = training_run_pb2.PolicySpec(name=f"p-{name}", path=str(self._folder / "model"))
        run = training_run_pb2.TrainingRun(
            algorithm="sft",
            project=A,
            policy=policy,
            settings_json=json.dumps({"parallel": parallel}),
            inputs={"demonstrations": "resources/said/versions/1"},
        )
        client = self._store.token(Role.CLIENT, project=A)
        request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run)
        answer = await TrainingRunServiceStub(await self.channel(client)).CreateTrainingRun(request)
        return str(answer.training_run.name)


@pytest.fixture
async def service(store: StoreHandle, stubs: Stubs, tmp_path: Path) -> AsyncIterator[Service]:
    for project in (A, B):
        await create_project(stubs, project)
    model_folder(tmp_path / "model", size_bytes=1000)
    said = resource_pb2.ResourceVersion(name="resources/said", kind="dataset", content=DEMONSTRATION)
    client = await store.stubs(token=store.token(Role.CLIENT, project=A))
    await client.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[said]))
    clusters = {"local": {"kind": "local"}, "machines": {"kind": "joined"}}
    async with AsyncExitStack() as stack:
        served = serving("algorithm", store, tmp_path / "service", model_roots="/", clusters=clusters)
        parts = await stack.enter_async_context(served)
        yield Service(target_of(parts), stack, store, tmp_path, revocations=parts.roles["revocations"])


@pytest.fixture
async def run(service: Service) -> str:
    return await service.run("run", JOINED)


async def test_a_machine_joins_the_run_that_its_token_names_alone(service: Service, run: str) -> None:
    other = await service.run("other", JOINED)
    assert await service.joins(run_token(run, role="rank"), run) is None
    told = set()
    for own, asked in (
        (other, run),
        (run, other),
        (f"{B}/trainingRuns/{run.rpartition('/')[2]}", run),
        (f"{A}/trainingRuns/none", f"{A}/trainingRuns/none"),
        (run, "not a name"),
    ):
        error = await service.joins(run_token(own, role="rank"), asked)
        assert isinstance(error, TrainingRunNotFound)
        told.add(error.message.replace(asked, "RUN"))
    # What is another's is as if it did not exist.
    assert len(told) == 1


@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.ADMIN, Role.RANK, Role.ATTEMPT)])
async def test_no_other_role_joins(service: Service, store: StoreHandle, run: str, role: Role) -> None:
    token = run_token(run, role=role) if role in RUN_ROLES else store.token(role, project=A)
    assert isinstance(await service.joins(token, run), PermissionDenied)


async def test_an_expired_token_joins_no_run_and_a_revoked_one_none_either(
    service: Service, store: StoreHandle, stubs: Stubs, run: str
) -> None:
    assert isinstance(await service.joins(run_token(run, role="rank", ttl_s=-1), run), TokenInvalid)
    asked = prj.IssueTokenRequest(project=A, role=prj.TOKEN_ROLE_RANK, subject="gpu-7", training_run=run)
    issued = await stubs.projects.IssueToken(asked)
    assert await service.joins(issued.token, run) is None
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=issued.info.token_id))
    await service.revocations.follow_once()
    assert isinstance(await service.joins(issued.token, run), TokenInvalid)


async def test_a_token_for_ranks_opens_nothing_else(service: Service, store: StoreHandle, run: str) -> None:
    token = run_token(run, role="rank")
    channel = await service.channel(token)
    source = weight_service_pb2.WeightSource(policy_version="resources/policy.p/versions/1")
    for call in (
        WeightServiceStub(channel).GetWeights(weight_service_pb2.GetWeightsRequest(source=source)),
        TrainingRunServiceStub(channel).GetTrainingRun(training_run_service_pb2.GetTrainingRunRequest(name=run)),
        anext(aiter(EngineServiceStub(channel).JoinEngine(iter_of(engine_service_pb2.JoinEngineRequest())))),
        (await store.stubs(token=token)).projects.ListTokens(prj.ListTokensRequest()),
    ):
        with pytest.raises(PermissionDenied):
            await call


async def iter_of(message: Any) -> AsyncIterator[Any]:
    yield message


@pytest.mark.parametrize("parallel", [{"kind": "none"}, {"kind": "ddp", "ranks": 2}], ids=str)
async def test_no_machine_joins_a_run_whose_ranks_are_elsewhere(service: Service, parallel: Mapping[str, Any]) -> None:
    run = await service.run("elsewhere", parallel)
    error = await service.joins(run_token(run, role="rank"), run)
    assert isinstance(error, TrainingRunStateInvalid)
    assert "not on a cluster of kind joined" in error.message


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"node": "", "ranks": 0}, ["hello.node", "hello.ranks"]),
        ({"node": "a b", "ranks": 1025}, ["hello.node", "hello.ranks"]),
        ({"node": "a" * 65}, ["hello.node"]),
        ({"node": "../../etc"}, ["hello.node"]),
        ({"gpus": -1, "cpus": -1, "memory_bytes": -1}, ["hello.gpus", "hello.cpus", "hello.memory_bytes"]),
        ({"build": {str(number): "x" for number in range(65)}}, ["hello.build"]),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_every_problem_of_a_hello_is_told(
    service: Service, run: str, fields: dict[str, Any], refused: Sequence[str]
) -> None:
    error = await service.joins(run_token(run, role="rank"), run, **fields)
    assert isinstance(error, ArgumentInvalid)
    assert [violation.field for violation in error.violations] == refused


async def test_a_machine_that_differs_is_refused_with_everything_in_which_it_does(service: Service, run: str) -> None:
    other = build() | {"torch": "0.1", "settings": "0" * 16}
    error = await Machine(service, run_token(run, role="rank"), hello(run, build=other)).joins()
    assert isinstance(error, ArgumentInvalid)
    told = [violation.description for violation in error.violations]
    assert [text.partition(",")[0] for text in told[:2]] == ["has torch 0.1", f"has settings {'0' * 16}"]
    assert len(told) == 2


async def test_of_two_machines_of_one_name_one_joins(service: Service, run: str) -> None:
    stays = [pb.JoinRanksRequest(status=pb.RanksStatus())]
    machines = [Machine(service, run_token(run, role="rank"), hello(run)) for _ in range(2)]
    tasks = [asyncio.create_task(machine.joins(says=stays)) for machine in machines]
    done, open_ = await asyncio.wait(tasks, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    [error] = [task.result() for task in done]
    assert isinstance(error, Unavailable)
    assert "has the name gpu-7" in error.message
    for task in open_:
        task.cancel()
    await asyncio.gather(*open_, return_exceptions=True)


async def test_what_is_said_in_no_order_ends_the_stream_alone(service: Service, run: str) -> None:
    token = run_token(run, role="rank")
    said = [
        pb.JoinRanksRequest(seen=pb.FoldersSeen(unseen=["/"])),
        pb.JoinRanksRequest(ended=pb.RankEnded(order=7, status=-9)),
        pb.JoinRanksRequest(status=pb.RanksStatus(order=-1, running=-1)),
        pb.JoinRanksRequest(),
        pb.JoinRanksRequest(hello=hello(run)),
    ]
    error = await Machine(service, token, hello(run)).joins(says=said)
    assert isinstance(error, ArgumentInvalid)
    assert await service.joins(token, run) is None
