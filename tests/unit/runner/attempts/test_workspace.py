"""The files of an attempt, and their deletion whatever became of them."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from fulmen.agent import NotInAttempt
from fulmen_runner.attempts.workspace import Workspaces
from fulmen_service_kit.isolation.trees import delete_tree


async def test_an_agent_that_asks_for_its_directory_gets_the_one_that_everything_else_gets(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    workspace = workspaces.of(b"input")
    assert not list(tmp_path.iterdir())
    here = workspace.open_here()
    opened = await asyncio.gather(*(asyncio.to_thread(workspace.open_here) for _ in range(8)), workspace.open())
    assert {each.work_dir for each in opened} == {here.work_dir}
    assert len(list(tmp_path.iterdir())) == 1
    await workspace.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotInAttempt, match="has ended"):
        workspace.open_here()
    assert not list(tmp_path.iterdir())


async def test_an_attempt_has_files_of_its_own_for_a_while(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    one, other = workspaces.of(b"input"), workspaces.of(b"")
    files = await one.open()
    assert await one.open() == files
    assert (await other.open()).root != files.root
    assert files.task_file.read_bytes() == b"input"
    assert list(files.work_dir.iterdir()) == list(files.temporary_dir.iterdir()) == []
    assert stat.S_IMODE(files.root.stat().st_mode) == stat.S_IMODE(files.work_dir.stat().st_mode) == 0o700
    assert files.new_rewards_file() != files.new_rewards_file()
    delete_tree(files.root)  # files that are gone already are no error
    await one.close()
    await other.close()
    await workspaces.of(b"never opened").close()
    assert list(tmp_path.iterdir()) == []


def hostile_tree(root: Path) -> None:
    """Makes what is hard to delete: no permissions, links, pipes, names that are no text, and great depth."""
    (root / "locked" / "inside").mkdir(parents=True)
    (root / "locked" / "inside" / "file").touch()
    (root / "link to a directory").symlink_to("/etc")
    (root / "no target").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    Path(os.fsdecode(os.fsencode(root / "odd") + b"\xff\n")).touch()
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=descriptor)
        inner = os.open("deep", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    (root / "locked" / "inside").chmod(0o000)
    (root / "locked").chmod(0o500)
    root.chmod(0o500)


def test_any_tree_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    hostile_tree(root)
    delete_tree(root)
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_permissions_stop_no_deletion_by_an_ordinary_user(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    inside = root / "locked" / "inside"
    inside.mkdir(parents=True)
    (inside / "file").touch()
    nobody = 65534
    for path in (tmp_path, root, inside.parent, inside, inside / "file"):
        os.chown(path, nobody, nobody)
    inside.chmod(0o000)
    inside.parent.chmod(0o500)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(tmp_path)
            os.setgid(nobody)
            os.setuid(nobody)
            delete_tree(Path("root", "locked"))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (root / "locked").exists()


def test_a_link_in_place_of_the_directory_is_deleted_and_not_followed(tmp_path: Path) -> None:
    target, root = tmp_path / "target", tmp_path / "root"
    (target / "precious").mkdir(parents=True)
    root.symlink_to(target)
    delete_tree(root)
    assert not root.exists()
    assert (target / "precious").is_dir()
