"""Uploaded models: another project's are as if they did not exist, and nothing but data ever gets a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import (
    ArgumentInvalid,
    FulmenError,
    ModelInUse,
    ModelNotFound,
    PermissionDenied,
    QuotaExceeded,
    SettingsInvalid,
    UploadDamaged,
)
from fulmen.models.files import manifest_digest
from fulmen.models.transfer import download_weights, upload_model
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.model_folders import content_of, manifest_of, model_folder
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle, Stubs, create_project

A, B = "projects/a", "projects/b"
DEMONSTRATION = b'{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'
LIMITS = {"upload_max_bytes": 4_000_000, "upload_quota_bytes": 5_000_000, "max_transfers": 2}
SHA = "a" * 64


class Member:
    """A project's member at the algorithm service."""

    def __init__(self, project: str, channel: Any) -> None:
        self.project = project
        self.weights = WeightServiceStub(channel)
        self.runs = TrainingRunServiceStub(channel)

    async def run(self, **policy: str) -> training_run_pb2.TrainingRun:
        """Creates a run with first weights."""
        run = training_run_pb2.TrainingRun(
            algorithm="sft",
            project=self.project,
            policy=training_run_pb2.PolicySpec(name=f"p-{self.project[-1]}", **policy),
            inputs={"demonstrations": "resources/said/versions/1"},
        )
        request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run)
        return (await self.runs.CreateTrainingRun(request)).training_run

    async def names(self) -> list[str]:
        return [each.name for each in (await self.weights.ListModels(pb.ListModelsRequest())).models]


@pytest.fixture
async def members(store: StoreHandle, stubs: Stubs, tmp_path: Path) -> AsyncIterator[tuple[Member, Member]]:
    """Yields a client of project a and one of project b."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(serving("algorithm", store, tmp_path, model_roots="/", **LIMITS))
        found = []
        for project in (A, B):
            await create_project(stubs, project)
            version = resource_pb2.ResourceVersion(
                name="resources/said", kind="dataset", content=DEMONSTRATION, project=project
            )
            await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
            token = store.token(Role.CLIENT, project=project)
            found.append(Member(project, await stack.enter_async_context(open_channel(target_of(parts), token=token))))
        yield found[0], found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny")


async def told(answer: Any, *names: str) -> str:
    """Returns how a call ended, with names left out."""
    try:
        text = str([each async for each in answer]) if hasattr(answer, "__aiter__") else str(await answer)
    except FulmenError as error:
        text = f"{type(error).__name__}: {error.message} {dict(error.metadata)} {error.violations}"
    for name in names:
        text = text.replace(name, "NAME")
    return text


async def sent(weights: WeightServiceStub, *messages: pb.UploadChunksRequest) -> pb.UploadChunksResponse:
    """Sends chunks; the error is that of the service, which gRPC forgets if the service ends the call first."""

    async def requests() -> AsyncIterator[pb.UploadChunksRequest]:
        for message in messages:
            yield message
        await asyncio.sleep(0)

    answer: pb.UploadChunksResponse = await weights.UploadChunks(requests(), timeout=20)
    return answer


async def test_a_model_of_another_project_is_as_if_it_did_not_exist(
    members: tuple[Member, Member], folder: Path
) -> None:
    a, b = members
    theirs = (await upload_model(b.weights, folder, alias="secret")).model.name
    digest = theirs.rpartition("/")[2]
    absent = {"model": f"{B}/models/{SHA}", "upload": f"{B}/uploads/{SHA}"}
    different: list[str] = []
    for name in (
        theirs,
        f"{B}/models/secret",
        f"{A}/models/{digest}",
        f"{A}/models/secret",
        "models/secret",
        "",
        "x" * 999,
    ):
        source = pb.WeightSource(model=name)
        for call in (
            lambda name: a.weights.GetWeights(pb.GetWeightsRequest(source=pb.WeightSource(model=name))),
            lambda name: a.weights.DownloadChunks(
                pb.DownloadChunksRequest(source=pb.WeightSource(model=name), path="config.json")
            ),
        ):
            answers = [await told(call(each), f"'{each[:160]}'") for each in (name, absent["model"])]
            if answers[0] != answers[1] or not answers[0].startswith("ModelNotFound"):
                different.append(f"{source}: {answers}")
    for name in (f"{B}/uploads/{digest}", f"{A}/uploads/{digest}", "uploads/x"):
        for call in (
            lambda name: sent(a.weights, pb.UploadChunksRequest(upload=name, path="config.json", data=b"x")),
            lambda name: a.weights.CommitUpload(pb.CommitUploadRequest(upload=name)),
        ):
            answers = [await told(call(each), f"'{each}'") for each in (name, absent["upload"])]
            if answers[0] != answers[1] or not answers[0].startswith("ModelNotFound"):
                different.append(f"{name!r}: {answers}")
    for name in (theirs, f"{B}/models/secret", f"{B}/uploads/{digest}"):
        with pytest.raises(ModelNotFound):
            await a.weights.DeleteModel(pb.DeleteModelRequest(name=name))
    assert not different, "\n".join(different)
    assert (await a.names(), await b.names()) == ([], [theirs])
    for request in (pb.BeginUploadRequest(project=B), pb.ListModelsRequest(project=B)):
        rpc = a.weights.BeginUpload if isinstance(request, pb.BeginUploadRequest) else a.weights.ListModels
        with pytest.raises(PermissionDenied, match="another project"):
            await rpc(request)


async def test_an_upload_does_not_tell_what_another_project_has(
    members: tuple[Member, Member], folder: Path, tmp_path: Path
) -> None:
    a, b = members
    await upload_model(b.weights, folder, alias="secret")
    done = await upload_model(a.weights, folder, alias="secret")
    assert done.sent_bytes == sum(file.size_bytes for file in manifest_of(folder)), "as if nobody had it"
    assert await a.names() == [done.model.name]
    await a.weights.DeleteModel(pb.DeleteModelRequest(name=done.model.name))
    assert len(await b.names()) == 1
    await download_weights(b.weights, pb.WeightSource(model=f"{B}/models/secret"), tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


async def test_a_run_begins_with_no_model_of_another_project(
    members: tuple[Member, Member], folder: Path, tmp_path: Path
) -> None:
    a, b = members
    digest = (await upload_model(b.weights, folder, alias="secret")).model.name.rpartition("/")[2]
    stored = tmp_path / "state/models/b" / digest
    assert (stored / "config.json").exists()
    (tmp_path / "link").symlink_to(stored)
    refused = [
        {"base": f"model:{digest}"}, {"base": "model:secret"}, {"base": f"model:../../b/models/{digest}"},
        {"base": "model:"}, {"base": str(stored)}, {"path": str(stored)}, {"path": str(tmp_path / "link")},
    ]  # fmt: skip
    for policy in refused:
        with pytest.raises(SettingsInvalid) as error:
            await a.run(**policy)
        assert [each.field for each in error.value.violations] == [f"policy.{next(iter(policy))}"]
    absent = await told(a.run(base=f"model:{SHA}"), SHA)
    assert await told(a.run(base=f"model:{digest}"), digest) == absent
    run = await b.run(base="model:secret")
    assert run.policy.base == "model:secret"
    for name in (f"{B}/models/secret", f"{B}/models/{digest}"):
        with pytest.raises(ModelInUse) as used:
            await b.weights.DeleteModel(pb.DeleteModelRequest(name=name))
        assert used.value.metadata["training_run"] == run.name
    await b.runs.CancelTrainingRun(training_run_service_pb2.CancelTrainingRunRequest(name=run.name))
    await b.weights.DeleteModel(pb.DeleteModelRequest(name=f"{B}/models/secret"))
    assert (await b.names(), stored.exists()) == ([], False)


HOSTILE = {
    "pickles": ["pytorch_model.bin", "weights.pt", "model.pkl", "optimizer.pickle", "a.ckpt", "x.npz"],
    "code": ["modeling.py", "setup.sh", "lib.so", "a.json.py", "sub/conftest.py"],
    "places": ["../x.json", "/etc/x.json", "a/../../x.json", ".model.json", ".git/x.json", "a//x.json", "x.json\0.py"],
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_manifest_of_anything_but_data_is_refused_as_a_whole(
    members: tuple[Member, Member], folder: Path, tmp_path: Path, kind: str
) -> None:
    a, _ = members
    files = [
        pb.WeightFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in manifest_of(folder)
    ]
    files += [pb.WeightFile(path=path, size_bytes=1, sha256=SHA) for path in HOSTILE[kind]]
    with pytest.raises(ArgumentInvalid) as refused:
        await a.weights.BeginUpload(pb.BeginUploadRequest(files=files, alias="../up"))
    assert len(refused.value.violations) == len(HOSTILE[kind]) + 1, "every problem is told at once"
    assert not list((tmp_path / "state").rglob(".uploads"))


async def test_chunks_that_lie_leave_nothing_under_a_name(
    members: tuple[Member, Member], folder: Path, tmp_path: Path
) -> None:
    a, _ = members
    files = [
        pb.WeightFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in manifest_of(folder)
    ]
    upload = (await a.weights.BeginUpload(pb.BeginUploadRequest(files=files))).upload

    def chunk(**fields: Any) -> pb.UploadChunksRequest:
        return pb.UploadChunksRequest(**{"upload": upload, "path": "model.safetensors", "data": b"x", **fields})

    lies = [
        (chunk(path="../../../b/x.json"), ArgumentInvalid), (chunk(path="pytorch_model.bin"), ArgumentInvalid),
        (chunk(path="config.json/../model.safetensors"), ArgumentInvalid), (chunk(data=b""), ArgumentInvalid),
        (chunk(data=bytes(2**20 + 1)), ArgumentInvalid), (chunk(data=bytes(5001)), ArgumentInvalid),
        (chunk(offset=1), FulmenError), (chunk(offset=-1), FulmenError), (chunk(offset=2**62), FulmenError),
        (chunk(data=bytes(5000)), UploadDamaged),
    ]  # fmt: skip
    for message, expected in lies:
        with pytest.raises(expected) as refused:
            await sent(a.weights, message)
        assert refused.value.reason != "INTERNAL", message.path
    assert (await a.names(), upload.rpartition("/")[2]) == ([], manifest_digest(manifest_of(folder)))
    stored = [path.name for path in (tmp_path / "state/models").rglob("*") if path.is_file()]
    assert set(stored) <= {"manifest.json", "empty.txt", "model.safetensors.part"}
    assert (await upload_model(a.weights, folder)).model.file_count == 4


async def test_what_a_project_may_send_is_bounded(members: tuple[Member, Member], tmp_path: Path) -> None:
    a, b = members
    reached: list[str] = []
    begun: list[pb.BeginUploadResponse] = []
    requests = []
    for seed, size_bytes in enumerate((3_000_000, 2_500_000, 4_500_000)):
        files = manifest_of(model_folder(tmp_path / str(seed), seed=seed, size_bytes=size_bytes))
        listed = [pb.WeightFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in files]
        requests.append(pb.BeginUploadRequest(files=listed))
        try:
            begun.append(await a.weights.BeginUpload(requests[-1]))
        except QuotaExceeded as error:
            reached.append(error.metadata["quota"])
    assert reached == ["model_bytes", "upload_bytes"]
    gate = asyncio.Event()

    async def slow(path: str) -> AsyncIterator[pb.UploadChunksRequest]:
        yield pb.UploadChunksRequest(upload=begun[0].upload, path=path, data=b"x")
        await gate.wait()

    paths = ["config.json", "model.safetensors"]
    streams = [asyncio.create_task(a.weights.UploadChunks(slow(path), timeout=60)) for path in paths]
    async with asyncio.timeout(50):
        while sum(each.received_bytes for each in (await a.weights.BeginUpload(requests[0])).missing) < len(paths):  # noqa: ASYNC110  # state of the service
            await asyncio.sleep(0.02)
    with pytest.raises(QuotaExceeded) as refused:
        await sent(a.weights)
    assert refused.value.metadata["quota"] == "transfers"
    assert (await sent(b.weights)).received_bytes == 0, "of one project alone"
    gate.set()
    await asyncio.gather(*streams)
