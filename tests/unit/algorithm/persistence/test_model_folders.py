"""A folder of weights is whole or not there, whenever the service is killed or the power is cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.model_folders import ModelFolders, copy_model
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.publishing import WrittenWeights
from tests.support.algorithm.new_run import training_run

FILES = ("config.json", "model.safetensors", "tokenizer/vocab.json")


class Killed(BaseException):
    """Ends the process."""


async def write(folder: Path) -> WrittenWeights:
    written(folder)
    return WrittenWeights(kind=WeightsKind.FULL, sha256="a" * 64, size_bytes=1, full_bytes=1)


def written(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in FILES)


async def test_a_folder_whose_removal_was_cut_off_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = ModelFolders(tmp_path, epoch=1)
    saved = await folders.save(write, 3)

    def cut_off(path: Path, ignore_errors: bool = False) -> None:
        if not path.exists():
            return
        (path / FILES[1]).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(Killed):
            await folders.prune([])
    again = await ModelFolders(tmp_path, epoch=2).save(write, 3)
    assert is_whole(again.path)
    await ModelFolders(tmp_path, epoch=2).prune([again.path])
    assert is_whole(again.path)
    assert not [*tmp_path.rglob(".*")]
    assert not saved.path.exists()


@contextmanager
def flushed_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the names of folders as they are renamed; all that is in them must have been flushed."""
    synced: set[Path] = set()
    renamed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def checked(path: Path, target: Path) -> Path:
        if path.is_dir():
            assert {path, *path.rglob("*")} <= synced
            renamed.append(target.name)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noted)
        patched.setattr(Path, "rename", checked)
        yield renamed


async def test_what_appears_was_flushed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = RunFiles(tmp_path / "runs" / "small", epoch=1)
    source = written(tmp_path / "source")
    with flushed_folders(monkeypatch) as renamed:
        saved = await files.save_model(write, 3)
        copy_model(source, tmp_path / "copy")
        kept = files.keep_reference(source)
        after = await files.taken_over(2, owner="b", record=training_run())
    assert renamed == [saved.path.name, "copy", "reference", after.journal.name]
    assert is_whole(saved.path)
    assert is_whole(kept)
