"""Models go to the service and come back whole, whatever breaks on the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import ArgumentInvalid, ModelNotFound, UploadDamaged, WeightsUnavailable
from fulmen.models.files import manifest_digest
from fulmen.models.transfer import TransferFailed, download_weights, upload_model
from fulmen.rpc.channel import open_channel
from fulmen.rpc.services import Targets, connect
from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.train import DataConfig, PolicyConfig, TrainConfig
from fulmen_algorithm.weights.delta import DELTA_FILE, encode
from fulmen_algorithm.weights.tensor_files import read_folder, write_tensors
from fulmen_cli.connection import Connection
from fulmen_cli.main import app
from fulmen_cli.model.transfer import with_uploaded_base
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.algorithm.machine import Machine
from tests.support.algorithm.model_folders import content_of, manifest_of, model_folder
from tests.support.algorithm.policy_versions import Policies, tensors
from tests.support.cli.command_runner import CliRunner
from tests.support.exchange.line import Line
from tests.support.service_kit.key_store import KeyService, serving_keys
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle

KEY = "k" * 32
MIB = 2**20
SIZE_BYTES = 6 * MIB + 12_345
PATIENCE_S = 90.0


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    async with serving_keys(KeyService(KEY)) as store:
        token = TokenSigner(KEY).issue(Role.SERVICE, subject="algorithm", ttl_s=3600)
        machine = Machine(store, token, tmp_path, warm_start="false")
        await machine.start()
        yield machine
        await machine.stop()


@pytest.fixture
def line(machine: Machine) -> Iterator[Line]:
    """Yields a line to the service, which tests cut."""
    line = Line(machine.port)
    yield line
    line.close()


@pytest.fixture
async def weights(line: Line) -> AsyncIterator[WeightServiceStub]:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="x", ttl_s=600, project="projects/a")
    async with open_channel(line.address, token=token) as channel:
        yield WeightServiceStub(channel)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny", size_bytes=SIZE_BYTES, more={"big/more.safetensors": bytes(3 * MIB)})


def at(places: list[int], act: Callable[[], None]) -> Callable[[int, int], None]:
    """Returns a listener of progress that acts once at each of some numbers of bytes."""
    left = sorted(places)

    def report(done: int, total: int) -> None:
        if left and done >= left[0]:
            left.pop(0)
            act()

    return report


async def test_a_folder_goes_through_a_line_that_breaks_and_comes_back_through_one(
    weights: WeightServiceStub, line: Line, folder: Path, tmp_path: Path
) -> None:
    cuts = [MIB, 4 * MIB, 7 * MIB]
    done = await upload_model(weights, folder, alias="tiny", on_progress=at(cuts, line.cut), patience_s=PATIENCE_S)
    assert done.model.name == f"projects/a/models/{manifest_digest(manifest_of(folder))}"
    assert (list(done.model.aliases), done.left_out) == (["tiny"], ())
    for source in (pb.WeightSource(model="projects/a/models/tiny"), pb.WeightSource(model=done.model.name)):
        target = tmp_path / "back" / source.model.rpartition("/")[2]
        line.to_damage["down"] = 1
        came = await download_weights(weights, source, target, on_progress=at(cuts, line.cut), patience_s=PATIENCE_S)
        assert content_of(target) == content_of(folder)
        assert (came.source.model, came.digest) == (done.model.name, done.model.name.rpartition("/")[2])
        assert not target.with_name(f"{target.name}.part").exists()


async def test_what_was_damaged_on_the_way_is_sent_again(weights: WeightServiceStub, line: Line, folder: Path) -> None:
    line.to_damage["up"] = 2
    done = await upload_model(weights, folder, patience_s=PATIENCE_S)
    assert done.model.file_count == 5
    assert line.to_damage["up"] == 0


async def test_a_service_that_is_killed_in_mid_upload_goes_on_when_it_is_back(
    machine: Machine, weights: WeightServiceStub, folder: Path, tmp_path: Path
) -> None:
    killed = asyncio.Event()

    def kill() -> None:
        machine.kill()
        killed.set()

    uploading = asyncio.create_task(
        upload_model(weights, folder, alias="tiny", on_progress=at([5 * MIB], kill), patience_s=PATIENCE_S)
    )
    async with asyncio.timeout(PATIENCE_S):
        await killed.wait()
        await machine.stop()
        await machine.start()
        done = await uploading
        total = sum(file.size_bytes for file in manifest_of(folder))
        # At most what was on the way when it was killed is sent twice.
        assert total <= done.sent_bytes <= 2 * total
        await download_weights(weights, pb.WeightSource(model=done.model.name), tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


async def test_an_upload_that_was_given_up_goes_on_where_it_was(
    machine: Machine, weights: WeightServiceStub, line: Line, folder: Path
) -> None:
    def leave() -> None:
        raise KeyError("the client ends")

    with pytest.raises(KeyError):
        await upload_model(weights, folder, on_progress=at([4 * MIB], leave))
    assert not (await weights.ListModels(pb.ListModelsRequest())).models
    done = await upload_model(weights, folder)
    total = sum(file.size_bytes for file in manifest_of(folder))
    assert done.sent_bytes < total
    assert (await upload_model(weights, folder)).sent_bytes == 0


async def test_a_file_that_arrived_whole_in_a_stream_that_broke_is_completed_when_the_upload_is_begun_again(
    weights: WeightServiceStub, folder: Path
) -> None:
    files = [pb.WeightFile(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256) for f in manifest_of(folder)]
    begun = await weights.BeginUpload(pb.BeginUploadRequest(files=files))
    data = (folder / "config.json").read_bytes()
    damaged = bytes([data[0] ^ 1, *data[1:]])
    path = "config.json"

    async def broken(data: bytes) -> AsyncIterator[pb.UploadChunksRequest]:
        yield pb.UploadChunksRequest(upload=begun.upload, path=path, data=data)
        # Beyond the end of the file: ends the stream before it is completed.
        yield pb.UploadChunksRequest(path=path, offset=len(data), data=b"x")

    for sent, refused in ((damaged, True), (data, False)):
        with pytest.raises(ArgumentInvalid):
            await weights.UploadChunks(broken(sent))
        if refused:
            with pytest.raises(UploadDamaged, match="SHA-256"):
                await weights.BeginUpload(pb.BeginUploadRequest(files=files))
        listed = {each.path for each in (await weights.BeginUpload(pb.BeginUploadRequest(files=files))).missing}
        assert (path in listed) is refused
    assert (await upload_model(weights, folder)).sent_bytes == sum(file.size_bytes for file in files) - len(data)


async def test_a_file_that_becomes_shorter_while_it_is_sent_ends_the_upload_with_its_name(
    weights: WeightServiceStub, folder: Path
) -> None:
    file = folder / "big/more.safetensors"
    with pytest.raises(TransferFailed, match=r"more\.safetensors has 3145728 bytes by its manifest, and none"):
        await upload_model(weights, folder, on_progress=lambda *_: os.truncate(file, MIB))


async def test_the_command_line_uploads_lists_downloads_and_deletes(
    machine: Machine, folder: Path, tmp_path: Path
) -> None:
    (folder / "modeling.py").write_text("raise SystemExit")
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="x", ttl_s=600, project="projects/a")
    where = ["--algorithm-target", machine.address, "--token", token]

    async def fulmen(*arguments: str | Path) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["model", *map(str, arguments), *where])
        return f"{done.exit_code} {done.output}"

    told = await fulmen("upload", folder, "--name", "tiny")
    digest = manifest_digest(manifest_of(folder))
    assert f"projects/a/models/{digest}: 5 files" in told
    assert "Left out, because they are not data files of a model: modeling.py." in told
    assert 'base = "model:tiny"' in told
    assert "nothing to send" in await fulmen("upload", folder)
    assert json.loads((await fulmen("uploaded", "--output", "json"))[2:])[0]["aliases"] == ["tiny"]
    assert "every file verified" in await fulmen("download", "tiny", tmp_path / "back")
    (folder / "modeling.py").unlink()
    assert content_of(tmp_path / "back") == content_of(folder)
    assert (await fulmen("download", "tiny", tmp_path / "back")).startswith("4 ")
    assert (await fulmen("delete", "tiny")).startswith("0 Deleted tiny.")
    assert (await fulmen("download", digest, tmp_path / "gone")).startswith("3 ")
    assert (await fulmen("upload", tmp_path / "none")).startswith("3 ")
    (tmp_path / "code").mkdir()
    told = await fulmen("upload", tmp_path / "code")
    assert told.startswith("2 ")
    assert "has 0 files" in told


async def test_a_training_on_another_machine_uploads_its_folder_first(machine: Machine, folder: Path) -> None:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="x", ttl_s=600, project="projects/a")
    target = machine.address
    config = TrainConfig(
        file=folder / "train.toml",
        name="x",
        policy=PolicyConfig(name="p", path=str(folder)),
        agent=AgentConfig(),
        data=DataConfig(),
        stages=(),
    )
    async with connect(Targets(store=target, algorithm=target, llm_proxy=target), token=token) as client:
        screen = Console(quiet=True)
        here = await with_uploaded_base(Connection(algorithm_target=target), client, config, screen)
        there = await with_uploaded_base(Connection(algorithm_target="gpu.example:7301"), client, config, screen)
    assert here == config
    assert there.policy == PolicyConfig(name="p", base=f"model:{manifest_digest(manifest_of(folder))}")


async def test_a_folder_is_not_overwritten(weights: WeightServiceStub, folder: Path) -> None:
    before = content_of(folder)
    with pytest.raises(TransferFailed, match="is not an empty folder"):
        await download_weights(weights, pb.WeightSource(model="projects/a/models/tiny"), folder)
    assert content_of(folder) == before


@pytest.fixture
async def policies(store: StoreHandle, tmp_path: Path) -> AsyncIterator[Policies]:
    async with (
        serving("algorithm", store, tmp_path) as parts,
        open_channel(target_of(parts), token=store.token(Role.CLIENT, project="projects/default")) as channel,
    ):
        yield Policies(tmp_path / "state/runs", WeightServiceStub(channel), store)


async def test_every_kind_of_version_is_downloaded_as_it_was_published(policies: Policies, tmp_path: Path) -> None:
    full = model_folder(await policies.publish("000001-full", {"kind": "full", "sha256": tensors(1).sha256()}))
    write_tensors(full / "model.safetensors", tensors(1).tensors, {})
    base = {"base": "resources/policy.solver/versions/1", "base_sha256": tensors(1).sha256()}
    delta = await policies.publish("000002-delta", {"kind": "delta", "sha256": tensors(2).sha256(), **base})
    encode(tensors(1), tensors(2), delta / DELTA_FILE)
    lora = await policies.publish(
        "000003-lora", {"kind": "lora", "sha256": "", "adapters": ["default"], "base_model": str(full)}
    )
    model_folder(lora, more={"default/adapter_config.json": b"{}"})
    merged = model_folder(lora.with_name("merged"), seed=4)
    last = {"kind": "lora", "sha256": "", "adapters": ["default"], "base_model": str(full), "merged": str(merged)}
    model_folder(await policies.publish("000004-lora", last), seed=5)

    async def download(version: str, form: pb.WeightForm = pb.WEIGHT_FORM_UNSPECIFIED) -> dict[str, bytes]:
        target = tmp_path / hashlib.sha256(f"{version} {form}".encode()).hexdigest()
        done = await download_weights(policies.client, policies.source(version, form), target)
        assert "/versions/" in done.source.policy_version
        assert done.source.project == "projects/default"
        return content_of(target)

    assert await download("/versions/1") == content_of(full)
    rebuilt = await download("/versions/2", pb.WEIGHT_FORM_FULL)
    assert set(rebuilt) == set(content_of(full))
    (tmp_path / "read").mkdir()
    (tmp_path / "read/model.safetensors").write_bytes(rebuilt["model.safetensors"])
    assert read_folder(tmp_path / "read").sha256() == tensors(2).sha256()
    assert await download("/versions/3") == content_of(lora)
    assert await download("/versions/2", pb.WEIGHT_FORM_DELTA) == content_of(delta)
    assert await download("/versions/3", pb.WEIGHT_FORM_BASE) == content_of(full)
    assert await download("") == await download("/aliases/latest", pb.WEIGHT_FORM_ADAPTERS)
    assert await download("/versions/4", pb.WEIGHT_FORM_FULL) == content_of(merged)
    for version, form in (
        ("/versions/3", pb.WEIGHT_FORM_FULL),
        ("/versions/3", pb.WEIGHT_FORM_DELTA),
        ("/versions/1", pb.WEIGHT_FORM_ADAPTERS),
        ("/versions/1", pb.WEIGHT_FORM_DELTA),
        ("/versions/2", pb.WEIGHT_FORM_BASE),
    ):
        with pytest.raises(WeightsUnavailable):
            await policies.client.GetWeights(pb.GetWeightsRequest(source=policies.source(version, form)))


async def test_weights_that_are_gone_are_told_as_gone(policies: Policies) -> None:
    path = await policies.publish("000001-full", {"kind": "full", "sha256": ""})
    path.rmdir()
    with pytest.raises(ModelNotFound, match="no longer exist"):
        await policies.client.GetWeights(pb.GetWeightsRequest(source=policies.source("/versions/1")))
