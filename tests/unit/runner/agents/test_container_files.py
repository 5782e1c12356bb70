"""What a container gets: limits, and files for reading only."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from fulmen_runner.agents.container.order import NOBODY_ID, attempt_archive, bundle_archive
from fulmen_runner.agents.specification import Limits


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
