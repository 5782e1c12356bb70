"""Which files of sums are deleted, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fulmen_exchange.aggregator.folders import make_folder
from fulmen_exchange.aggregator.held_folder import FolderHeld
from fulmen_exchange.server.runs import RUN_FILE, ExchangeFolders

HOUR_S = 3600.0
KEEP_S = 24 * HOUR_S
OVER, ACTIVE = "projects/default/trainingRuns/over", "projects/default/trainingRuns/active"
NOW_S = 1e9


def folders(root: Path) -> ExchangeFolders:
    return ExchangeFolders(root, keep_s=KEEP_S, is_over=lambda run: run == OVER, now=lambda: NOW_S)


def kept(folders: ExchangeFolders, run: str, *, shard: int = 0, age_s: float = 0.0) -> Path:
    """Makes the folder of a shard with a sum, as if it were so old."""
    held = folders.hold(run, shard)
    held.release()
    folder = held.path
    file = folder / "call-0.safetensors"
    file.write_bytes(b"sum")
    for path in (file, folder, folder.with_suffix(".lock"), folder.parent / RUN_FILE, folder.parent):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return file


@pytest.mark.parametrize("is_served", [True, False])
def test_the_sums_of_a_run_that_is_over_go_once_no_rank_takes_part(is_served: bool, tmp_path: Path) -> None:
    known = folders(tmp_path)
    over, active = kept(known, OVER), kept(known, ACTIVE)
    known.sweep({OVER} if is_served else set())

    assert over.exists() == is_served
    assert active.exists()


@pytest.mark.parametrize("age_s", [KEEP_S - HOUR_S, KEEP_S + HOUR_S])
def test_sums_that_nobody_has_added_to_for_long_go(age_s: float, tmp_path: Path) -> None:
    known = folders(tmp_path)
    file = kept(known, ACTIVE, age_s=age_s)
    kept(known, ACTIVE, shard=1, age_s=KEEP_S + HOUR_S)
    known.sweep(set())

    assert file.exists() == (age_s < KEEP_S)
    assert (tmp_path / file.parent.parent.name).exists() == (age_s < KEEP_S)


def test_a_folder_of_which_nobody_knows_the_run_goes_by_its_age(tmp_path: Path) -> None:
    known = folders(tmp_path)
    young, old = kept(known, OVER), kept(known, ACTIVE, age_s=2 * KEEP_S)
    for file in (young, old):
        (file.parent.parent / RUN_FILE).write_text("{")
    os.utime(old.parent.parent / RUN_FILE, (0, 0))
    known.sweep({ACTIVE})

    assert young.exists()
    assert not old.exists()


def test_runs_of_two_projects_have_folders_of_their_own(tmp_path: Path) -> None:
    known = folders(tmp_path)
    ours, theirs = known.hold(OVER, 0), known.hold("projects/other/trainingRuns/over", 0)
    assert ours.path.parent != theirs.path.parent
    ours.release()
    again = folders(tmp_path).hold(OVER, 0)
    assert again.path.parent == ours.path.parent
    again.release()
    theirs.release()


@pytest.mark.parametrize("is_synced", [True, False])
def test_the_disk_knows_a_folder_before_anything_is_put_into_it(
    is_synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    root = tmp_path / "state" / "exchange"
    made = ExchangeFolders(root, keep_s=KEEP_S, is_over=lambda _: False, is_synced=is_synced).hold(ACTIVE, 0)
    make_folder(made.path, is_synced=is_synced)
    made.release()

    assert made.path.is_dir()
    assert synced == ([tmp_path, tmp_path / "state", root, made.path.parent] if is_synced else [])


def test_a_server_that_lives_keeps_its_folder_and_one_that_has_gone_leaves_it_with_all_sums(tmp_path: Path) -> None:
    first = folders(tmp_path).hold(ACTIVE, 0)
    (first.path / "call-0.safetensors").write_bytes(b"sum")
    with pytest.raises(FolderHeld):
        folders(tmp_path).hold(ACTIVE, 0)
    first.release()
    second = folders(tmp_path).hold(ACTIVE, 0)

    assert (second.path / "call-0.safetensors").read_bytes() == b"sum"
    assert not first.path.exists()
    second.release()


def test_a_folder_of_an_older_version_is_taken_with_its_sums(tmp_path: Path) -> None:
    known = folders(tmp_path)
    held = known.hold(ACTIVE, 0)
    held.release()
    (held.path / "call-0.safetensors").write_bytes(b"sum")
    held.path.rename(held.path.with_name("shard-0"))
    again = known.hold(ACTIVE, 0)

    assert (again.path / "call-0.safetensors").read_bytes() == b"sum"
    again.release()


def test_the_folders_of_other_shards_are_not_touched(tmp_path: Path) -> None:
    known = folders(tmp_path)
    tenth, first = known.hold(ACTIVE, 10), known.hold(ACTIVE, 1)
    assert tenth.path.is_dir()
    assert first.path.is_dir()
    tenth.release()
    first.release()
