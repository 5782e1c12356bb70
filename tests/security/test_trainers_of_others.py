"""Trainers: another project's are as if they did not exist, and weights of another project cannot be begun with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import fulmen
from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.algorithm.v1 import training_run_pb2
from fulmen.errors import FulmenError, ModelInUse, PermissionDenied, SettingsInvalid, TrainerNotFound
from fulmen.ids import uuid7
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.models import small_model
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle, Stubs, create_project

A, B = "projects/a", "projects/b"
ROW = pb.TrainingRow(token_ids=[1, 2, 3])


@pytest.fixture
async def members(
    store: StoreHandle, stubs: Stubs, tmp_path: Path
) -> AsyncIterator[tuple[fulmen.AsyncClient, fulmen.AsyncClient]]:
    """Yields a client of project a and one of project b."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(serving("algorithm", store, tmp_path / "service"))
        stack.push_async_callback(parts.drain)
        found = []
        for project in (A, B):
            await create_project(stubs, project)
            client = fulmen.AsyncClient(
                store=store.target,
                algorithm=target_of(parts),
                llm_proxy="127.0.0.1:1",
                token=store.token(Role.CLIENT, project=project),
            )
            found.append(await stack.enter_async_context(client))
        yield found[0], found[1]


async def told(client: fulmen.AsyncClient, name: str) -> list[str]:
    """Returns how every rpc about a trainer ends, with its name left out."""
    stub = client.services.trainers
    calls: list[Any] = [
        stub.GetTrainer(pb.GetTrainerRequest(name=name)),
        stub.DeleteTrainer(pb.DeleteTrainerRequest(name=name)),
        stub.ForwardBackward(pb.ForwardBackwardRequest(name=name, sequence=1, rows=[ROW], loss="cross_entropy")),
        stub.OptimStep(pb.OptimStepRequest(name=name, sequence=1, adam=pb.AdamSettings(learning_rate=1e-3))),
        stub.Sample(pb.SampleRequest(name=name, prompt_ids=[1], max_tokens=1)),
        stub.RenderMessages(pb.RenderMessagesRequest(name=name, messages_json='[{"role": "user", "content": "1"}]')),
        stub.SaveCheckpoint(pb.SaveCheckpointRequest(name=name)),
        stub.PublishVersion(pb.PublishVersionRequest(name=name)),
        stub.CreateTrainer(pb.CreateTrainerRequest(checkpoint=f"{name}/checkpoints/kept")),
    ]
    answers = []
    for call in calls:
        try:
            answers.append(str(await call))
        except FulmenError as error:
            problems = [(each.field, each.description) for each in error.violations]
            answers.append(f"{type(error).__name__}: {error.message} {dict(error.metadata)} {problems}")
    return [each.replace(name, "NAME") for each in answers]


async def test_a_trainer_of_another_project_is_as_if_it_did_not_exist(
    members: tuple[fulmen.AsyncClient, fulmen.AsyncClient], tmp_path: Path
) -> None:
    a, b = members
    base = await b.models.upload(small_model(tmp_path / "tiny"), name="tiny")
    theirs = await b.trainer(base, policy="p", lora=fulmen.Lora(rank=2))
    await theirs.save("kept")

    absent = await told(a, f"{B}/trainers/{uuid7()}")
    assert await told(a, theirs.name) == absent
    assert [each.partition(":")[0] for each in absent] == [
        "TrainerNotFound",
        "TrainerNotFound",
        *["TrainerNotFound"] * 6,
        "SettingsInvalid",
    ]
    for name in (f"{A}/trainers/{theirs.id}", "", "x" * 999, f"{B}/trainers/../{theirs.id}", f"{theirs.name}/"):
        with pytest.raises(TrainerNotFound):
            await a.services.trainers.GetTrainer(pb.GetTrainerRequest(name=name))
    assert not [each async for each in a.trainers.list()]
    with pytest.raises(PermissionDenied):
        await a.services.trainers.ListTrainers(pb.ListTrainersRequest(project=B))
    assert (await theirs.refresh()).proto.loaded


async def test_a_trainer_begins_with_no_weights_of_another_project_and_with_no_folder_that_is_not_allowed(
    members: tuple[fulmen.AsyncClient, fulmen.AsyncClient], tmp_path: Path
) -> None:
    a, b = members
    folder = small_model(tmp_path / "tiny")
    base = await b.models.upload(folder, name="tiny")
    theirs = await b.trainer(base, policy="p")
    await theirs.publish()

    stored = next((tmp_path / "service/state/models/b").glob("[0-9a-f]*"))
    published = next((tmp_path / "service/state/runs/b").glob("trainer-*/models/*/*"))
    for source in (
        {"base": base},
        {"path": str(folder)},
        {"path": str(stored)},
        {"path": str(published)},
        {"path": f"{tmp_path}/service/state/runs/a/../b/{published.name}"},
        {"build": "file.py:build"},
    ):
        policy = training_run_pb2.PolicySpec(name="p", **source)
        with pytest.raises(SettingsInvalid) as refused:
            await a.services.trainers.CreateTrainer(pb.CreateTrainerRequest(policy=policy))
        assert [each.field for each in refused.value.violations] == [f"policy.{next(iter(source))}"]
    with pytest.raises(ModelInUse):
        await b.services.weights.DeleteModel(_delete(base))
    await theirs.delete()
    await b.services.weights.DeleteModel(_delete(base))


def _delete(base: str) -> Any:
    from fulmen.algorithm.v1 import weight_service_pb2

    return weight_service_pb2.DeleteModelRequest(name=f"{B}/models/{base.removeprefix('model:')}")
