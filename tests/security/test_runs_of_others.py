"""Training runs of another project: their names can be neither learned nor taken, at any rpc that names a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as exchange
from fulmen.algorithm.v1 import prompt_search_pb2 as prompts_pb
from fulmen.algorithm.v1 import training_run_pb2
from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import FulmenError, TrainingRunExists, TrainingRunNotFound
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_service_pb2
from fulmen_algorithm.transport import training_runs
from fulmen_service_kit.security.tokens import Role
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle, Stubs, create, create_project

A, B = "projects/a", "projects/b"
DEMONSTRATION = b'{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'
TERMS = exchange.ExchangeTerms(
    world_size=1, shard_count=1, layout_digest="x", codec="topk", codec_version=1, codec_settings_json="{}", segment_sizes=[16],
    quorum=1, min_wait_s=1, max_wait_s=1, straggler_timeout_s=1, lease_s=5,
)  # fmt: skip


class Caller:
    """A project's member at the algorithm service."""

    def __init__(self, project: str, folder: Path, channel: Any, ranks: Any) -> None:
        self.project = project
        self._folder = folder
        self.runs = TrainingRunServiceStub(channel)
        self.ranks = GradientExchangeServiceStub(ranks)

    def draft(self, name: str, **fields: Any) -> training_run_pb2.TrainingRun:
        run = training_run_pb2.TrainingRun(
            name=name,
            algorithm="sft",
            display_name=self.project,
            policy=training_run_pb2.PolicySpec(name=f"policy-{self.project[-1]}", path=str(self._folder)),
            inputs={"demonstrations": "resources/said/versions/1"},
        )
        run.MergeFrom(training_run_pb2.TrainingRun(**fields))
        return run

    async def create(self, name: str, **fields: Any) -> training_run_pb2.TrainingRun:
        run = self.draft(name, **fields)
        return (await self.runs.CreateTrainingRun(pb.CreateTrainingRunRequest(training_run=run))).training_run

    async def get(self, name: str) -> training_run_pb2.TrainingRun:
        return (await self.runs.GetTrainingRun(pb.GetTrainingRunRequest(name=name))).training_run

    async def names(self) -> list[str]:
        return [run.name for run in (await self.runs.ListTrainingRuns(pb.ListTrainingRunsRequest())).training_runs]


@pytest.fixture
async def members(store: StoreHandle, stubs: Stubs, tmp_path: Path) -> AsyncIterator[tuple[Caller, Caller]]:
    """Yields a member of project a and one of project b; both projects have the same resource."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(serving("algorithm", store, tmp_path, model_roots="/"))
        found = []
        for project in (A, B):
            await create_project(stubs, project)
            version = resource_pb2.ResourceVersion(
                name="resources/said", kind="dataset", content=DEMONSTRATION, project=project
            )
            await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
            channels = [
                await stack.enter_async_context(
                    open_channel(target_of(parts), token=store.token(role, project=project))
                )
                for role in (Role.CLIENT, Role.SERVICE)
            ]
            found.append(Caller(project, tmp_path, *channels))
        yield found[0], found[1]


async def told(answer: Any, *names: str) -> str:
    """Returns how a call ended, with names of runs left out."""
    try:
        text = str([each async for each in answer]) if hasattr(answer, "__aiter__") else str(await answer)
    except FulmenError as error:
        text = f"{type(error).__name__}: {error.message} {dict(error.metadata)} {getattr(error, 'violations', ())}"
    for name in names:
        text = text.replace(name, "RUN")
    return text


async def test_two_projects_have_runs_of_the_same_id(members: tuple[Caller, Caller], tmp_path: Path) -> None:
    for member in members:
        name = f"{member.project}/trainingRuns/same"
        created = await member.create(name)
        assert (created.name, created.project, created.display_name) == (name, member.project, member.project)
        assert await member.names() == [name]
        assert (await member.get(name)).display_name == member.project
        assert (await member.create(name)).create_time == created.create_time, "creation is idempotent in the project"
        with pytest.raises(TrainingRunExists):
            await member.create(name, display_name="another")
    a, b = members
    await a.runs.CancelTrainingRun(pb.CancelTrainingRunRequest(name=f"{A}/trainingRuns/same"))
    assert (await b.get(f"{B}/trainingRuns/same")).state == training_run_pb2.TRAINING_RUN_STATE_PENDING
    assert sorted(path.parent.name for path in tmp_path.glob("state/runs/*/same")) == ["a", "b"]


async def test_a_creation_that_takes_long_holds_up_no_other_project(
    members: tuple[Caller, Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = members
    begun, released = asyncio.Event(), asyncio.Event()
    check = training_runs.checked_runs

    async def slow(drafts: Any, **rest: Any) -> Any:
        if drafts[0].project == A:
            begun.set()
            await released.wait()
        return await check(drafts, **rest)

    monkeypatch.setattr(training_runs, "checked_runs", slow)
    async with asyncio.timeout(60):
        creating = asyncio.create_task(a.create(f"{A}/trainingRuns/slow"))
        await begun.wait()
        assert (await b.create(f"{B}/trainingRuns/quick")).name == f"{B}/trainingRuns/quick"
        released.set()
        assert (await creating).name == f"{A}/trainingRuns/slow"


async def test_the_project_of_a_run_is_that_of_its_name(members: tuple[Caller, Caller]) -> None:
    a, b = members
    theirs, absent = f"{B}/trainingRuns/same", f"{B}/trainingRuns/none"
    await b.create(theirs)
    for project in ("", A, B):
        answers = [await told(a.create(name, project=project), name) for name in (theirs, absent)]
        assert answers[0] == answers[1]
        assert answers[0].startswith("SettingsInvalid" if project == A else "PermissionDenied"), answers[0]
    unnamed = await a.create("")
    assert unnamed.name.startswith(f"{A}/trainingRuns/")
    assert await b.names() == [theirs]


async def test_an_input_names_no_run_of_another_project(members: tuple[Caller, Caller]) -> None:
    a, b = members
    theirs, absent = f"{B}/trainingRuns/same", f"{B}/trainingRuns/none"
    await b.create(theirs)
    answers = [await told(a.create("", inputs={"rollouts": name}), name) for name in (theirs, absent)]
    assert answers[0] == answers[1]
    assert "inputs.rollouts" in answers[0]


async def test_a_later_stage_is_no_run_of_another_project(members: tuple[Caller, Caller]) -> None:
    a, b = members
    theirs, absent = f"{B}/trainingRuns/same", f"{B}/trainingRuns/none"
    await b.create(theirs)
    for project in ("", A, B):
        answers = []
        for name in (theirs, absent):
            first, later = (a.draft("", display_name="stages"), a.draft(name, project=project))
            request = pb.CreateTrainingRunRequest(training_run=first, next_stages=[later])
            answers.append(await told(a.runs.CreateTrainingRun(request), name))
        assert answers[0] == answers[1]
        assert answers[0].startswith("SettingsInvalid"), answers[0]
        assert "next_stages[0]." in answers[0]
    assert await a.names() == []
    assert await b.names() == [theirs]


async def test_a_run_of_another_project_is_as_if_it_did_not_exist(members: tuple[Caller, Caller]) -> None:
    a, b = members
    theirs = f"{B}/trainingRuns/same"
    await b.create(theirs)
    before = await b.get(theirs)
    different: list[str] = []
    for name in (theirs, f"{A}/trainingRuns/same", "trainingRuns/same", f"{B}/rollouts/same", ""):
        absent = f"{A}/trainingRuns/none"
        for rpc in ("GetTrainingRun", "WatchTrainingRun", "PauseTrainingRun", "ResumeTrainingRun", "CancelTrainingRun",
                    "GetTrainingRunReport", "ListCheckpoints", "RollbackTrainingRun", "UpdateTrainingRun", "ListPromptCandidates"):  # fmt: skip
            answers = []
            for asked in (name, absent):
                request = getattr(prompts_pb if "Prompt" in rpc else pb, f"{rpc}Request")()
                field = {
                    "ListCheckpoints": "parent",
                    "ListPromptCandidates": "parent",
                    "RollbackTrainingRun": "checkpoint",
                }.get(rpc, "name")
                setattr(request, field, f"{asked}/checkpoints/1" if field == "checkpoint" else asked)
                answers.append(await told(getattr(a.runs, rpc)(request), f"'{asked}'"))
            if answers[0] != answers[1] or not answers[0].startswith("TrainingRunNotFound"):
                different.append(f"{rpc} of {name!r}: {answers}")
    assert not different, "\n".join(different)
    assert await b.get(theirs) == before


async def test_ranks_of_another_project_are_no_part_of_an_exchange(members: tuple[Caller, Caller]) -> None:
    a, b = members
    theirs = f"{B}/trainingRuns/same"
    join = exchange.JoinRequest(training_run=theirs, incarnation="b-0", terms=TERMS)
    assert (await b.ranks.Join(join)).member_count == 1
    for name in (theirs, f"{B}/trainingRuns/none", "trainingRuns/same"):
        opened = exchange.ExchangeRequest(open=exchange.OpenExchange(training_run=name, incarnation="b-0"))
        stream = a.ranks.Exchange()
        await stream.write(opened)
        for answer in (
            a.ranks.Join(exchange.JoinRequest(training_run=name, incarnation="b-0", terms=TERMS)),
            a.ranks.Leave(exchange.LeaveRequest(training_run=name, incarnation="b-0")),
            a.ranks.GetRound(exchange.GetRoundRequest(training_run=name, round=1)),
            a.ranks.GetExchange(exchange.GetExchangeRequest(training_run=name)),
            stream,
        ):
            expected = "TrainingRunNotFound: The training run does not exist. {'training_run': 'RUN'} ()"
            assert await told(answer, name) == expected
    own = f"{A}/trainingRuns/same"
    assert (await a.ranks.Join(exchange.JoinRequest(training_run=own, incarnation="a-0", terms=TERMS))).ranks == [0]
    [shard] = (await b.ranks.GetExchange(exchange.GetExchangeRequest(training_run=theirs))).shards
    assert [member.rank for member in shard.members] == [0]
    assert (await b.ranks.Join(join)).membership_epoch == 1, "the rank of the other project replaced no one"


async def test_a_rollout_belongs_to_a_run_of_its_project(store: StoreHandle, stubs: Stubs) -> None:
    for project in (A, B):
        await create_project(stubs, project)
    mine, other = [await store.stubs(role=Role.CLIENT, project=project) for project in (A, B)]
    (rollout,) = await create(mine, training_run=f"{A}/trainingRuns/same")
    await create(other, training_run=f"{B}/trainingRuns/same")
    refused = [
        await told(create(mine, project=A, training_run=name), name)
        for name in (f"{B}/trainingRuns/same", f"{B}/trainingRuns/none")
    ]
    assert refused[0] == refused[1]
    assert "is not in the rollout's project" in refused[0]
    with pytest.raises(FulmenError, match="another project"):
        await mine.rollouts.CancelRollouts(
            rollout_service_pb2.CancelRolloutsRequest(training_run=f"{B}/trainingRuns/same")
        )
    for asked, project in ((f"{A}/trainingRuns/same", ""), (f"{A}/trainingRuns/same", A)):
        request = rollout_service_pb2.ListRolloutsRequest(training_run=asked, project=project)
        assert [each.name for each in (await mine.rollouts.ListRollouts(request)).rollouts] == [rollout]


async def test_an_unknown_name_says_the_name(members: tuple[Caller, Caller]) -> None:
    longest = f"projects/{'a' * 63}/trainingRuns/{'b' * 63}"
    with pytest.raises(TrainingRunNotFound) as refused:
        await members[0].get(longest)
    assert refused.value.metadata["training_run"] == longest
