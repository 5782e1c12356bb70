"""The state directory of a local stack is its owner's alone, and git takes nothing of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fulmen_cli.local.credentials import Credentials
from fulmen_cli.local.record import StackFolder


def test_a_state_directory_is_closed_and_ignored_also_one_that_was_open(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path / ".fulmen")
    folder.path.mkdir(mode=0o755)
    folder.create()
    Credentials(folder.path).signing_key()
    folder.keep_ports({"store": 7101})

    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    staged = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert staged.stdout == ""
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "signing.key").stat().st_mode & 0o777 == 0o600


def test_an_own_ignore_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n!README.md\n")
    StackFolder(tmp_path).create()
    assert (tmp_path / ".gitignore").read_text() == "*\n!README.md\n"
