"""What a tenant's code leaves in its folders, or changes while a service walks them, touches nothing outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fulmen_service_kit.isolation.trees import delete_tree, give_files

UID = 1_234_567_890
DEPTH = 1500
WALKS = {
    "deleting": delete_tree,
    "giving": pytest.param(
        lambda root: give_files(root, UID),
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
    ),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Returns a folder of somebody else, with a file."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True, mode=0o755)
    (folder / "precious").write_text("kept")
    return folder


def swapping_after(listings: int, inside: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces a folder with a link when so many folders have been listed, as a thread of an agent could at that moment."""
    listed, scandir = [0], os.scandir

    @contextmanager
    def scanned(place: str | int | Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(place) as entries:
            yield iter(list(entries))
        listed[0] += 1
        if listed[0] == listings:
            inside.rename(inside.with_name("hidden"))
            inside.symlink_to(outside)

    monkeypatch.setattr(os, "scandir", scanned)


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
@pytest.mark.parametrize("listings", [1, 2, 3])
def test_a_folder_that_becomes_a_link_while_a_service_walks_leads_nowhere(
    tmp_path: Path, outside: Path, walk: Callable[[Path], None], listings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for name in ("a", "b", "c"):
        (root / name / "precious" / "inner").mkdir(parents=True)
    found = [outside, *outside.rglob("*")]
    before = [(path, path.stat().st_uid, path.stat().st_mode) for path in found]
    with monkeypatch.context() as patched, suppress(OSError):
        swapping_after(listings, root / "b", outside, patched)
        walk(root)
    assert [(path, path.stat().st_uid, path.stat().st_mode) for path in [outside, *outside.rglob("*")]] == before


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_tree_deeper_than_any_path_is_long_is_walked(tmp_path: Path, walk: Callable[[Path], None]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    folder = os.open(root, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("deep", dir_fd=folder)
        folder, above = os.open("deep", os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    walk(root)
    gone = not root.exists()
    assert gone or os.fstat(folder).st_uid == UID
    os.close(folder)
    if not gone:
        delete_tree(root)
