"""What a killed runner left is deleted, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from fulmen_runner.agents.own_directory import delete_leftovers, own_directory

HOLDER = """
import os, sys
from pathlib import Path
from fulmen_runner.agents.own_directory import own_directory
with own_directory(Path(sys.argv[1])) as path:
    (path / "deep").mkdir()
    (path / "deep" / "file").touch()
    (path / "deep").chmod(0o500)
    print(path, flush=True)
    sys.stdin.read()
"""


def test_the_directory_of_a_killed_process_is_deleted_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    stranger = tmp_path / "fulmen-runner-without-a-lock"
    stranger.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        with own_directory(tmp_path) as mine:
            for thread in threading.enumerate():
                if thread.name == "leftovers":  # it would be at the same work, and hold the locks that it tries
                    thread.join(30)
            delete_leftovers(tmp_path)
            assert (path / "deep" / "file").exists()
            assert mine.exists()
            holder.kill()
            holder.wait(30)
            delete_leftovers(tmp_path)
            assert sorted(tmp_path.iterdir()) == sorted([mine, stranger])
    assert list(tmp_path.iterdir()) == [stranger]
