"""A service never outlives the process that started it, however that one ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulmen_cli.local.process import ChildProcess

WAIT_LIMIT_S = 20.0
# A module that connects to the test, says its process id, and then waits for ever, whatever it is asked.
STUBBORN = """
import os, signal, socket, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"]))) as connection:
    connection.sendall(str(os.getpid()).encode())
threading.Event().wait()
"""
# A process that starts that module as a supervisor would, says the child's process id, and waits for ever.
PARENT = """
import asyncio, os, sys
from pathlib import Path
from fulmen_cli.local.process import ChildProcess

async def main(folder):
    child = await ChildProcess.start("stubborn", (), environment=dict(os.environ), log_file=folder / "log", folder=folder)
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_LIMIT_S)
        yield server


@pytest.fixture
def folder(tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEST_PORT", str(listener.getsockname()[1]))
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def said(listener: socket.socket) -> int:
    """Waits for the child to connect and returns the process id that it says."""
    connection, _ = listener.accept()
    with connection:
        return int(connection.recv(32))


def await_end(pidfd: int) -> bool:
    """Waits until the process of a pidfd has ended; returns False if it did not within the limit."""
    return bool(select.select([pidfd], [], [], WAIT_LIMIT_S)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_killing_the_parent_kills_the_child(folder: Path, listener: socket.socket) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        said(listener)
        try:
            parent.send_signal(signal.SIGKILL)
            assert await_end(pidfd)
        finally:
            os.close(pidfd)


async def test_a_process_that_ignores_the_request_to_end_is_killed_after_the_grace(
    folder: Path, listener: socket.socket
) -> None:
    child = await ChildProcess.start(
        "stubborn", (), environment=dict(os.environ), log_file=folder / "log", folder=folder
    )

    assert await asyncio.to_thread(said, listener) == child.pid
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL
