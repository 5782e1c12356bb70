"""Leftovers of dead runners are removed and those of live ones are not; read-only files of containers."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fulmen_runner.agents.container.files import NOBODY_ID, attempt_archive, bundle_archive
from fulmen_runner.agents.ownership import Owner, deadline_of
from fulmen_runner.agents.specification import Limits

NOW = 1_800_000_000.0


def left(owner: Owner, process: str, *, host: str = "", deadline_unix_s: float = NOW + 1) -> bool:
    return owner.is_leftover(host=host or owner.host, process=process, deadline_unix_s=deadline_unix_s, now_unix_s=NOW)


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_is_left_behind_is_that_of_the_dead_and_what_is_overdue() -> None:
    me = Owner.this_process("here")
    _, born, namespace = me.process.split("-")
    assert not left(me, me.process)
    assert left(me, me.process, deadline_unix_s=NOW - 1)
    assert left(me, f"{dead_process()}-{born}-{namespace}")
    # A process that has the number of a dead one.
    assert left(me, f"{os.getpid()}-{int(born) - 100}-{namespace}")
    parent = psutil.Process(os.getppid())
    assert not left(me, f"{parent.pid}-{int(parent.create_time())}-{namespace}")


def test_the_runners_of_other_hosts_and_namespaces_are_not_judged() -> None:
    me = Owner.this_process("here")
    gone = f"{dead_process()}-1-{me.process.rpartition('-')[2]}"
    assert not left(me, gone, host="there")
    assert not left(me, "1-1-1")
    assert not left(me, "nonsense")
    # Docker gives this name to one container only: another namespace is an earlier life of it.
    assert left(replace(me, host="0123456789ab"), "1-1-1")


def test_a_deadline_that_cannot_be_read_never_comes() -> None:
    assert deadline_of({"at": "17"}, "at") == 17
    assert deadline_of({"at": "soon"}, "at") == deadline_of({}, "at") == float("inf")


@pytest.mark.parametrize(
    ("asked", "most", "gets"), [(0, 8, 8), (4, 8, 4), (16, 8, 8), (4, 0, 4), (0, 0, 0)]
)  # fmt: skip
def test_an_agent_gets_what_it_asks_for_and_no_more_than_there_is(asked: int, most: int, gets: int) -> None:
    limits = Limits(memory_bytes=asked).capped(Limits(memory_bytes=most, cpu_count=2))
    assert limits == Limits(memory_bytes=gets, cpu_count=2)


def test_bundles_are_packed_once_for_reading_only(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle-1"
    (bundle / "bin").mkdir(parents=True)
    (bundle / "bin" / "run").write_text("x")
    (bundle / "bin" / "run").chmod(0o755)
    (bundle / "data").write_text("y")
    packed = bundle_archive(bundle)
    with tarfile.open(packed) as tar:
        found = {member.name: (member.uid, member.mode) for member in tar}
    assert found == {
        "bundle": (NOBODY_ID, 0o555),
        "bundle/bin": (NOBODY_ID, 0o555),
        "bundle/bin/run": (NOBODY_ID, 0o555),
        "bundle/data": (NOBODY_ID, 0o444),
    }
    written = packed.stat().st_mtime_ns
    assert bundle_archive(bundle).stat().st_mtime_ns == written


def test_the_files_of_an_attempt() -> None:
    with tarfile.open(fileobj=io.BytesIO(attempt_archive(b"{}"))) as tar:
        modes = {member.name: member.mode for member in tar}
        task = tar.extractfile("task")
        assert task is not None
        assert task.read() == b"{}"
    assert modes == {".": 0o755, "work": 0o777, "rewards.jsonl": 0o666, "task": 0o444}
