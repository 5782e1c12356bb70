"""Bundles: equal folders give equal bytes, and nothing leaves the folder by accident."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from fulmen.train_toml.train import ConfigError
from fulmen.training import bundle
from fulmen.training.bundle import pack_bundle


def fill(folder: Path) -> Path:
    (folder / "lib").mkdir(parents=True)
    (folder / "agent.py").write_text("x = 1\n")
    (folder / "lib" / "tool.py").write_text("y = 2\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def members(content: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {member.name: member for member in archive.getmembers()}


def test_equal_folders_give_equal_bytes_whatever_their_times_and_places(tmp_path: Path) -> None:
    first, second = fill(tmp_path / "first"), fill(tmp_path / "second")
    os.utime(second / "agent.py", (1_000_000_000, 1_000_000_000))
    (second / "agent.py").chmod(0o640)

    assert pack_bundle(first).content == pack_bundle(second).content


def test_a_changed_file_or_execute_bit_changes_the_bytes(tmp_path: Path) -> None:
    before = pack_bundle(fill(tmp_path)).content
    (tmp_path / "agent.py").chmod(0o755)
    executable = pack_bundle(tmp_path).content
    (tmp_path / "agent.py").write_text("x = 2\n")

    assert len({before, executable, pack_bundle(tmp_path).content}) == 3


def test_caches_version_control_and_large_data_stay_outside(tmp_path: Path) -> None:
    fill(tmp_path)
    for name in ("__pycache__/a.pyc", ".git/config", ".venv/bin/python", ".fulmen/stack.json", "sub/__pycache__/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("no")
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_text("{}\n")
    large.write_bytes(b"x" * (1024 * 1024 + 1))

    packed = pack_bundle(tmp_path, data_files=(small, large))

    assert packed.files == ("agent.py", "lib/tool.py", "run.sh", "small.jsonl")
    assert members(packed.content)["run.sh"].mode == 0o755
    assert members(packed.content)["agent.py"].mode == 0o644


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "agent")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "agent" / "link.txt").symlink_to(tmp_path / "secret.txt")

    with pytest.raises(ConfigError, match="only links to files inside the directory"):
        pack_bundle(tmp_path / "agent")


def test_a_link_inside_the_folder_becomes_a_file(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "link.py").symlink_to(tmp_path / "agent.py")

    assert members(pack_bundle(tmp_path).content)["link.py"].isreg()


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    (tmp_path / "weights.bin").write_bytes(os.urandom(4096))
    monkeypatch.setattr(bundle, "MAX_BUNDLE_BYTES", 2048)

    with pytest.raises(ConfigError, match=r"weights\.bin"):
        pack_bundle(tmp_path)
