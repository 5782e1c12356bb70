"""The short form of `make crash-matrix`: under every fault the run ends and every rollout counts once. And its own parts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.plan import FULL, SHORT
from tests.support.distributions import ROOT

LIMIT_S = 840.0
GOAL_CELLS = 60
BLOCK = 4096


@pytest.mark.long(short=True)
@pytest.mark.timeout(900)
async def test_every_run_of_the_short_matrix_ends_and_every_rollout_counts_once(tmp_path: Path) -> None:
    output = tmp_path / "matrix.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.reliability", "--short", "--output", output, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(output.read_text(encoding="utf-8"))

    short = {cell["key"]: [*cell["notes"], *cell.get("problems", ())] for cell in found["cells"] if not cell["holds"]}
    assert not short, said.decode()
    assert {cell["key"] for cell in found["cells"]} | found["not_made"].keys() == {cell.key for cell in SHORT}
    retried = {cell["key"]: cell["retried"] for cell in found["cells"]}
    assert "LEASE_LOST" in retried["runner-1/kill"], "the runner held nothing when it died"


def test_the_whole_matrix_has_each_cell_once_and_a_control_for_each_victim() -> None:
    keys = [cell.key for cell in FULL]
    assert len(set(keys)) == len(keys) >= GOAL_CELLS
    harmed = {cell.victims[0] for cell in FULL if len(cell.victims) == 1}
    controls = {cell.victims[0] for cell in FULL if cell.fault == "none"}
    # A backend has the control of its postmaster.
    assert harmed - controls == {"backend"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """Yields a disk whose power can be cut, its one file, and the folder of its images."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("umount") is None:
        pytest.skip("mounting a disk needs root and FUSE")
    image, place = tmp_path / "0.img", tmp_path / "fuse"
    place.mkdir()
    image.write_bytes(bytes(4 * BLOCK))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.reliability.volatile_disk", image, place], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process, place / "disk", tmp_path
    process.communicate()
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_cut_disk_keeps_what_was_flushed_and_loses_what_was_not(
    disk: tuple[subprocess.Popen[str], Path, Path],
) -> None:
    process, file, folder = disk
    assert process.stdin is not None
    assert process.stdout is not None
    with file.open("r+b", buffering=0) as opened:
        opened.write(b"a" * BLOCK)
        os.fsync(opened.fileno())
        opened.write(b"b" * BLOCK)
    process.stdin.write(f"cut {folder / '1.img'} 0\n")
    process.stdin.flush()

    assert process.stdout.readline().split() == ["1", "0"]
    left = (folder / "1.img").read_bytes()
    assert left == b"a" * BLOCK + bytes(3 * BLOCK)
