"""Uploads arrive in pieces, survive a kill, and become a model as a whole or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import (
    ArgumentInvalid,
    ModelExists,
    ModelNotFound,
    QuotaExceeded,
    UploadDamaged,
    UploadIncomplete,
    UploadOffsetInvalid,
)
from fulmen.models.files import manifest_digest
from fulmen_algorithm.models import model_store, uploads
from fulmen_algorithm.models.model_store import ModelStore, StoredModel
from fulmen_algorithm.models.names import ModelName
from fulmen_algorithm.models.uploads import Begun, UploadLimits, Uploads
from tests.support.algorithm.model_folders import content_of, manifest_of, model_folder

PROJECT = "projects/a"
LIMITS = UploadLimits(max_bytes=100_000, quota_bytes=250_000, idle_s=60, keep_s=1000)


class World:
    """The uploads of a service, whose clock stands until it is moved; `restarted` is what the next process sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 1_000_000.0
        self.restarted()

    def restarted(self) -> None:
        self.models = ModelStore(self.folder / "models", clock=lambda: self.now_s)
        self.uploads = Uploads(self.models, LIMITS)

    def begin(self, folder: Path, *, project: str = PROJECT, alias: str = "") -> Begun:
        return self.uploads.begin(project, manifest_of(folder), alias)

    def send(self, begun: Begun, folder: Path, *, chunk: int = 2000, stop_after: int = 1_000_000) -> int:
        """Sends what is missing, up to so many bytes; returns what was sent. Nothing is flushed of a file that is cut off."""
        sent = 0
        for file, arrived in begun.missing:
            content = (folder / file.path).read_bytes()
            writer = self.uploads.writer(begun.name, file.path)
            for offset in range(arrived, len(content), chunk):
                if sent >= stop_after:
                    writer.close()
                    return sent
                piece = content[offset : offset + chunk]
                writer.write(offset, piece)
                sent += len(piece)
            writer.finish()
            writer.close()
        return sent

    def uploaded(self, folder: Path, *, project: str = PROJECT, alias: str = "") -> StoredModel:
        begun = self.begin(folder, project=project, alias=alias)
        self.send(begun, folder)
        return self.uploads.commit(begun.name, alias)

    def files(self, model: StoredModel) -> dict[str, bytes]:
        return content_of(self.models.use(model.name)[1])

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "models/a").iterdir() if not path.name.startswith("."))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny")


def test_a_folder_becomes_a_model_under_the_digest_of_its_manifest(world: World, folder: Path) -> None:
    model = world.uploaded(folder, alias="tiny")
    assert model.name.id == manifest_digest(manifest_of(folder))
    assert world.files(model) == content_of(folder)
    assert world.models.find(ModelName(project=PROJECT, id="tiny")) == model
    assert [each.name for each in world.models.listed(PROJECT)] == [model.name]


def test_an_equal_folder_is_stored_once_and_sends_nothing(world: World, folder: Path, tmp_path: Path) -> None:
    first = world.uploaded(folder, alias="one")
    begun = world.begin(model_folder(tmp_path / "again"), alias="two")
    assert (begun.model, begun.missing) == (first, ())
    assert world.uploads.commit(begun.name, "two").aliases == ("one", "two")
    assert world.on_disk() == [first.name.id]


def test_a_file_that_another_model_of_the_project_has_is_not_sent_again(
    world: World, folder: Path, tmp_path: Path
) -> None:
    world.uploaded(folder)
    changed = model_folder(tmp_path / "changed", more={"config.json": b"[]"})
    assert [file.path for file, _ in world.begin(changed).missing] == ["config.json"]
    elsewhere = world.begin(changed, project="projects/b")
    assert len(elsewhere.missing) == 3, "what another project has says nothing"
    first, second = world.uploaded(folder), world.uploaded(changed)
    world.models.delete(first)
    world.models.remove_deleted()
    assert world.files(second) == content_of(changed)


@pytest.mark.parametrize("stop_after", range(0, 6000, 1000))
def test_a_service_that_is_killed_in_mid_upload_loses_nothing_and_shows_no_half_model(
    world: World, folder: Path, stop_after: int
) -> None:
    begun = world.begin(folder, alias="tiny")
    sent = world.send(begun, folder, chunk=1000, stop_after=stop_after)
    world.restarted()
    assert world.models.listed(PROJECT) == []
    with pytest.raises(ModelNotFound):
        world.models.find(ModelName(project=PROJECT, id="tiny"))
    again = world.begin(folder, alias="tiny")
    total = sum(file.size_bytes for file in manifest_of(folder))
    assert world.send(again, folder) == total - sent
    assert world.files(world.uploads.commit(again.name, "tiny")) == content_of(folder)


def test_a_service_that_is_killed_in_mid_commit_has_the_model_or_the_upload(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = world.begin(folder, alias="tiny")
    world.send(begun, folder)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    steps: list[tuple[object, str]] = [
        (ModelStore, "add"), (Path, "rename"), (Uploads, "_remove"), (ModelStore, "alias"), (os, "link"),
    ]  # fmt: skip
    for owner, step in steps:
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, killed)
            with pytest.raises(KeyboardInterrupt):
                world.uploads.commit(begun.name, "tiny")
        world.restarted()
        assert world.on_disk() in ([], [begun.name.id])
        again = world.begin(folder, alias="tiny")
        assert again.missing == ()
    model = world.uploads.commit(begun.name, "tiny")
    assert (world.files(model), model.aliases) == (content_of(folder), ("tiny",))


def test_a_commit_can_be_repeated(world: World, folder: Path) -> None:
    model = world.uploaded(folder)
    assert world.uploads.commit(replace(model.name, is_upload=True), "tiny").aliases == ("tiny",)


def test_a_file_that_is_not_what_the_manifest_says_is_dropped_and_can_be_sent_again(
    world: World, folder: Path, tmp_path: Path
) -> None:
    begun = world.begin(folder)
    wrong = model_folder(tmp_path / "wrong", seed=1)
    with pytest.raises(UploadDamaged, match=r"config\.json does not have the SHA-256") as damaged:
        world.send(begun, wrong)
    assert damaged.value.metadata["path"] == "config.json"
    with pytest.raises(UploadIncomplete) as incomplete:
        world.uploads.commit(begun.name, "")
    assert {each.field for each in incomplete.value.violations} == {file.path for file, _ in begun.missing}
    world.send(world.begin(folder), folder)
    assert world.files(world.uploads.commit(begun.name, "")) == content_of(folder)


@pytest.mark.parametrize(("offset", "size"), [(1, 10), (0, 5001), (5000, 1), (-1, 1)])
def test_a_chunk_continues_its_file_and_does_not_go_beyond_it(
    world: World, folder: Path, offset: int, size: int
) -> None:
    writer = world.uploads.writer(world.begin(folder).name, "model.safetensors")
    with pytest.raises((UploadOffsetInvalid, ArgumentInvalid)):
        writer.write(offset, bytes(size))
    writer.close()
    assert {file.path: arrived for file, arrived in world.begin(folder).missing}["model.safetensors"] == 0


def test_an_idle_upload_is_removed_and_an_active_one_is_not(world: World, folder: Path, tmp_path: Path) -> None:
    idle, active = world.begin(folder), world.begin(model_folder(tmp_path / "other", seed=1))
    world.now_s += LIMITS.idle_s - 1
    world.send(active, tmp_path / "other")
    world.now_s += 2
    world.uploads.sweep(lambda model: False)
    with pytest.raises(ModelNotFound):
        world.uploads.writer(idle.name, "config.json")
    assert world.begin(tmp_path / "other").missing == ()


def test_a_model_that_is_not_used_is_removed_unless_a_run_needs_it(world: World, folder: Path, tmp_path: Path) -> None:
    unused = world.uploaded(folder, alias="unused")
    needed = world.uploaded(model_folder(tmp_path / "needed", seed=1))
    world.now_s += 10_000.0
    fresh = world.uploaded(model_folder(tmp_path / "fresh", seed=2))
    world.uploads.sweep(lambda model: model.name == needed.name)
    assert {model.name for model in world.models.listed(PROJECT)} == {needed.name, fresh.name}
    assert world.on_disk() == sorted([needed.name.id, fresh.name.id])
    world.uploaded(model_folder(tmp_path / "next", seed=3), alias="unused")
    assert unused.name != world.models.find(ModelName(project=PROJECT, id="unused")).name


def test_an_alias_belongs_to_one_model(world: World, folder: Path, tmp_path: Path) -> None:
    world.uploaded(folder, alias="tiny")
    other = model_folder(tmp_path / "other", seed=1)
    with pytest.raises(ModelExists, match="Choose another one"):
        world.begin(other, alias="tiny")
    begun = world.begin(other)
    world.send(begun, other)
    with pytest.raises(ModelExists):
        world.uploads.commit(begun.name, "tiny")
    world.uploaded(other, project="projects/b", alias="tiny")


@pytest.mark.parametrize(
    ("sizes", "quota"), [([99_000], ""), ([101_000], "upload_bytes"), ([90_000, 90_000, 90_000], "model_bytes")]
)
def test_what_does_not_fit_is_refused_before_a_byte_is_sent(
    world: World, tmp_path: Path, sizes: list[int], quota: str
) -> None:
    refused = ""
    for number, size_bytes in enumerate(sizes):
        try:
            world.begin(model_folder(tmp_path / str(number), seed=number, size_bytes=size_bytes))
        except QuotaExceeded as error:
            refused = error.metadata["quota"]
    assert refused == quota
    assert world.uploads.count() == len(sizes) - bool(quota)


def test_the_number_of_files_of_a_project_is_bounded_whatever_their_size(
    world: World, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.uploaded(folder)
    other = model_folder(tmp_path / "other", seed=1)
    monkeypatch.setattr(uploads, "MAX_PROJECT_FILES", 2 * len(manifest_of(folder)))
    begun = world.begin(other)
    third = model_folder(tmp_path / "third", seed=2)
    with pytest.raises(QuotaExceeded) as refused:
        world.begin(third)
    assert refused.value.metadata["quota"] == "model_files"
    world.begin(third, project="projects/b")
    world.uploads.delete(begun.name)
    world.begin(third)


def test_the_number_of_aliases_of_a_project_is_bounded(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "MAX_ALIASES", 2)
    name = world.uploaded(folder, alias="one").name
    for _ in range(2):
        world.uploads.commit(name, "two")
    with pytest.raises(QuotaExceeded) as refused:
        world.uploads.commit(name, "three")
    assert refused.value.metadata["quota"] == "model_aliases"
    assert world.models.find(name).aliases == ("one", "two")


def test_what_is_remembered_of_models_is_bounded_by_their_files(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "KEPT_FILES", 10)
    for seed in range(5):
        world.uploaded(model_folder(tmp_path / str(seed), seed=seed))
    for _ in range(2):
        assert len(world.models.listed(PROJECT)) == 5
        assert sum(len(record["files"]) for record in world.models._records.values()) <= 10


def test_the_number_of_uploads_of_a_project_is_bounded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 3)

    def begin(seed: int) -> Begun:
        return world.begin(model_folder(tmp_path / str(seed), seed=seed, size_bytes=1))

    for seed in range(3):
        begin(seed)
    with pytest.raises(QuotaExceeded, match="not committed"):
        begin(3)
    world.uploads.delete(begin(0).name)
    begin(3)
