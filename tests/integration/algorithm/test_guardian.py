"""The guardian of foreign programs: no process of the program is left, whichever process ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fulmen_algorithm.engines import guardian
from tests.support.processes import alive

LIMIT_S = 20
# A program with a child that no signal but the last one ends, as one that hangs; it tells both ids.
PROGRAM = """
trap '' TERM
sh -c 'trap "" TERM; echo child $$; while :; do sleep 0.05; done' &
echo program $$
wait
wait
"""

Guarded = tuple["subprocess.Popen[bytes]", int, int]


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shortens the grace that a hanging program is given, in a copy of the script."""
    source = Path(guardian.__file__).read_text()
    assert "GRACE_S = 8.0" in source
    (tmp_path / "guardian.py").write_text(source.replace("GRACE_S = 8.0", "GRACE_S = 0.3"))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """Runs the program under a guardian; yields the guardian and the ids of both processes."""
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-I", str(tmp_path / "guardian.py"), str(log), "sh", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until(lambda: log.exists() and len(log.read_text().split()) == 4)
        words = log.read_text().split()
        yield process, int(words[words.index("program") + 1]), int(words[words.index("child") + 1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait(LIMIT_S)


def until(holds: Callable[[], bool]) -> None:
    """Returns when something holds.

    Raises:
        AssertionError: if it does not hold in time.
    """
    give_up_at = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_nothing_is_left_when_the_parent_ends(guarded):
    process, *others = guarded
    process.stdin.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert not any(map(alive, others))


def test_nothing_is_left_when_the_guardian_is_terminated(guarded):
    process, *others = guarded
    process.terminate()
    process.wait(LIMIT_S)
    assert not any(map(alive, others))


def test_nothing_is_left_when_the_program_is_killed(guarded):
    process, program, child = guarded
    os.kill(program, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert not alive(child)


def status_of(folder: Path, *program: str) -> int:
    """Runs a program under a guardian; returns the guardian's status."""
    command = [sys.executable, "-I", str(folder / "guardian.py"), str(folder / "log"), *program]
    # Its input stays open: when it closes, whoever started it is gone, and the program is ended.
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        return process.wait(LIMIT_S)


def test_the_status_is_the_programs(tmp_path):
    assert status_of(tmp_path, "sh", "-c", "echo out; exit 3") == 3
    assert (tmp_path / "log").read_text() == "out\n"
    assert status_of(tmp_path, "/nowhere/vllm") == guardian.CANNOT_START
    assert "/nowhere/vllm: No such file or directory" in (tmp_path / "log").read_text()
