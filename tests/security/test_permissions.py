"""Every rpc of every service × every role × the project of the token: allowed or refused as the tables here say.

The tables are written by hand, apart from the one that the services read: a cell that differs fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, TokenInvalid, TooManyInvalidTokens
from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT, AttemptName, uuid7
from fulmen_service_kit.security.tokens import RUN_ROLES, Role, TokenSigner
from tests.support.services import SERVICES, serving, target_of
from tests.support.store.rpc_roles import MAY_CALL as STORE
from tests.support.store.rpcs import exchange, listed_rpcs
from tests.support.store.running import SIGNING_KEY, StoreHandle, create, create_project

OTHER_PROJECT = "projects/other"
PROJECTS = (DEFAULT_PROJECT, OTHER_PROJECT, ALL_PROJECTS)
A, S, R, C, V, K = Role.ADMIN, Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER, Role.ATTEMPT
E, M = Role.ENGINE, Role.RANK
OF_ONE_PROJECT = (Role.ATTEMPT, *RUN_ROLES)

ALGORITHM = (
    {
        f"/fulmen.algorithm.v1.{rpc}": roles
        for rpcs, roles in (
            (
                "CreateTrainingRun PlanTrainingRun PauseTrainingRun ResumeTrainingRun CancelTrainingRun RollbackTrainingRun "
                "UpdateTrainingRun",
                {A, S, C},
            ),
            (
                "GetTrainingRun ListTrainingRuns WatchTrainingRun ListCheckpoints GetTrainingRunReport ListPromptCandidates",
                {A, S, C, V},
            ),
            ("ListAlgorithms", {A, S, C, V}),
        )
        for rpc in (f"TrainingRunService/{name}" for name in rpcs.split())
    }
    | {
        f"/fulmen.algorithm.v1.GradientExchangeService/{rpc}": roles
        for rpc, roles in {
            "Join": {A, S},
            "Leave": {A, S},
            "Exchange": {A, S},
            "GetRound": {A, S, C, V},
            "GetExchange": {A, S, C, V},
        }.items()
    }
    | {
        f"/fulmen.algorithm.v1.TrainerService/{rpc}": roles
        for rpc, roles in {
            "CreateTrainer": {A, S, C},
            "GetTrainer": {A, S, C, V},
            "ListTrainers": {A, S, C, V},
            "DeleteTrainer": {A, S, C},
            "ForwardBackward": {A, S, C},
            "OptimStep": {A, S, C},
            "Sample": {A, S, C},
            "RenderMessages": {A, S, C},
            "SaveCheckpoint": {A, S, C},
            "PublishVersion": {A, S, C},
        }.items()
    }
    | {
        f"/fulmen.algorithm.v1.WeightService/{rpc}": roles
        for rpc, roles in {
            "BeginUpload": {A, S, C},
            "UploadChunks": {A, S, C},
            "CommitUpload": {A, S, C},
            "ListModels": {A, S, C, V},
            "DeleteModel": {A, S, C},
            "GetWeights": {A, S, E, C},
            "DownloadChunks": {A, S, E, C},
        }.items()
    }
    | {"/fulmen.algorithm.v1.EngineService/JoinEngine": {A, E}}
    | {"/fulmen.algorithm.v1.RankService/JoinRanks": {A, M}}
)
LLM_PROXY = (
    {
        f"/fulmen.llm_proxy.v1.RouteService/{rpc}": {A, S}
        for rpc in ["PutRoute", "PromoteVersion", "DeleteRoute", "RollbackRoute", "SplitTraffic", "ApplyFile"]
    }
    | {
        f"/fulmen.llm_proxy.v1.{rpc}": {A, S, C, V}
        for rpc in [
            "RouteService/GetRoute",
            "RouteService/ListRoutes",
            "RouteService/WatchRoutes",
            "BackendService/ListBackends",
            "BackendService/GetBackendHealth",
        ]
    }
    | {
        f"/fulmen.llm_proxy.v1.BackendService/{verb}": {A, S}
        for verb in [
            "RegisterBackend",
            "DrainBackend",
            "ResumeBackend",
            "HoldBackend",
            "ReleaseBackend",
            "DeleteBackend",
        ]
    }
    | {
        "/fulmen.llm_proxy.v1.CaptureService/FlushCaptures": {A, S, R},
        "/fulmen.llm_proxy.v1.CompletionService/Complete": {A, S, C, K},
        "/fulmen.llm_proxy.v1.CompletionService/StreamComplete": {A, S, C, K},
    }
)
RUNNER = {
    f"/fulmen.runner.v1.RunnerService/{rpc}": {A, S, R} for rpc in ("GetStatus", "Drain", "SetSlots", "DumpStacks")
}

# What all callers of a proxy share belongs to the project whose routes it serves.
OF_THE_SERVED_PROJECT = frozenset(rpc for rpc, roles in LLM_PROXY.items() if roles == {A, S})
OF_ALL_PROJECTS = (
    "/fulmen.runner.v1.RunnerService/",
    "/fulmen.store.v1.PeerService/",
    "/fulmen.store.v1.ProjectService/CreateProject",
    "/fulmen.store.v1.ProjectService/DeleteProject",
)


def token(role: Role, project: str) -> str:
    """Returns a token of a role that is bound to a project."""
    signer = TokenSigner(SIGNING_KEY)
    if role is not Role.ATTEMPT:
        run = f"{project}/trainingRuns/r" if role in RUN_ROLES else ""
        return signer.issue(role, subject="x", ttl_s=600, project=project, training_run=run)
    name = AttemptName(project=project, rollout_id=uuid7(), number=1)
    return signer.attempt_key(name, project=project, lease_id="l", epoch=1, mode="train", ttl_s=600)


def expected(rpc: str, may_call: Mapping[str, set[Role]]) -> set[tuple[str, Role, str]]:
    """Returns the cells of an rpc that are allowed: rpc, role, project of the token."""
    projects = set(PROJECTS)
    if rpc in OF_THE_SERVED_PROJECT:
        projects = {DEFAULT_PROJECT, ALL_PROJECTS}
    if rpc.startswith(OF_ALL_PROJECTS):
        projects = {ALL_PROJECTS}
    return {(rpc, role, project) for role in may_call[rpc] for project in projects}


async def allowed(target: str) -> set[tuple[str, Role, str]]:
    """Calls every rpc that a server lists, with every role and project; returns the cells that were not refused.

    The request cannot be decoded, so that a call that is allowed changes nothing.
    """
    async with grpc.aio.insecure_channel(target) as channel:
        rpcs = await listed_rpcs(channel)
        cells = [
            (rpc, role, project)
            for rpc in rpcs
            for role in Role
            for project in PROJECTS
            if role not in OF_ONE_PROJECT or project != ALL_PROJECTS
        ]

        async def is_allowed(rpc: str, role: Role, project: str) -> bool:
            metadata = (("authorization", f"Bearer {token(role, project)}"),)
            outcome = await exchange(channel, rpcs[rpc], [b"\xff"], metadata=metadata)
            # Attempt keys are unknown to the runner; of many, the later ones are refused without being read.
            assert isinstance(outcome, PermissionDenied | ArgumentInvalid | TokenInvalid | TooManyInvalidTokens)
            return isinstance(outcome, ArgumentInvalid)

        outcomes = await asyncio.gather(*(is_allowed(*cell) for cell in cells))
    return {cell for cell, is_open in zip(cells, outcomes, strict=True) if is_open}


def same(found: set[tuple[str, Role, str]], table: Mapping[str, set[Role]]) -> None:
    """Checks that just the expected cells are allowed."""
    cells = {cell for rpc in table for cell in expected(rpc, table)}
    wanted = {cell for cell in cells if cell[1] not in OF_ONE_PROJECT or cell[2] != ALL_PROJECTS}
    assert sorted(map(str, found - wanted)) == [], "allowed, but should be refused"
    assert sorted(map(str, wanted - found)) == [], "refused, but should be allowed"


TABLES = {"store": STORE, "llm_proxy": LLM_PROXY, "algorithm": ALGORITHM, "runner": RUNNER}


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_lets_in_just_whom_the_table_says(store: StoreHandle, tmp_path: Path, service: str) -> None:
    async with serving(service, store, tmp_path) as parts:
        same(await allowed(target_of(parts)), TABLES[service])


HTTP_PATHS = {"": {A, S, C, K}, "/projects/{project}/rollouts/{rollout}/attempts/1": {A, S, C, K, R}}


@pytest.mark.parametrize("prefix", HTTP_PATHS)
async def test_the_proxys_http_port_lets_in_just_whom_the_table_says(
    store: StoreHandle, tmp_path: Path, prefix: str
) -> None:
    stubs = await store.stubs()
    await create_project(stubs, OTHER_PROJECT)
    (named,) = await create(stubs)
    cells = [
        (role, project)
        for role in Role
        for project in PROJECTS
        if role not in OF_ONE_PROJECT or project != ALL_PROJECTS
    ]
    path = f"/{named}/attempts/1" if prefix else ""
    async with serving("llm_proxy", store, tmp_path, roles=True) as parts, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{parts.ports['http_port']}"
        async with asyncio.timeout(30):
            while (await session.get(f"{url}/readyz")).status != 200:  # noqa: ASYNC110  # state of the proxy
                await asyncio.sleep(0.05)
        found = {}
        for role, project in cells:
            headers = {"authorization": f"Bearer {token(role, project)}"}
            async with session.get(f"{url}{path}/v1/models", headers=headers) as answer:
                found[role, project] = answer.status
    refused_roles = {cell: status for cell, status in found.items() if cell[0] not in HTTP_PATHS[prefix]}
    assert set(refused_roles.values()) <= {403}
    let_in = {cell for cell, status in found.items() if status == 200}
    # The attempt that the path names is not running and of the default project: only its absence is told.
    assert let_in == ({cell for cell in cells if cell[0] in HTTP_PATHS[prefix]} if not prefix else set())
    assert {status for cell, status in found.items() if cell not in let_in} <= {403, 404}
