"""A pipe in the event loop: its descriptor is closed once, whatever the loop."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from functools import partial
from io import FileIO
from pathlib import Path

import pytest
import uvloop

from fulmen_service_kit.pipe_transports import read_pipe, write_pipe

LOOPS = [pytest.param(None, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
PIPES = 2000
OPENED_AT_ONCE = 250


class Opener:
    """A thread that opens files, many in one call, and sees whether anybody else closes them."""

    def __init__(self) -> None:
        self.lost = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Opener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            while not self._stopping.is_set():
                socket.send_fds(ours, [b"*"], [ours.fileno()] * OPENED_AT_ONCE)
                for descriptor in socket.recv_fds(theirs, 1, OPENED_AT_ONCE)[1]:
                    try:
                        os.close(descriptor)
                    except OSError:
                        self.lost += 1


async def use_pipes() -> None:
    for _ in range(PIPES):
        read, write = os.pipe()
        closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        reading = await read_pipe(partial(Ended, closed), FileIO(read, "rb"))
        writing = await write_pipe(FileIO(write, "wb"))
        writing.close()
        await closed
        reading.close()


class Ended(asyncio.Protocol):
    def __init__(self, closed: asyncio.Future[Exception | None]) -> None:
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(exc)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_closing_a_pipe_closes_no_file_that_another_thread_has_opened(loop_factory: object) -> None:
    with Opener() as opener, asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(use_pipes())
    assert opener.lost == 0


def test_no_other_module_gives_a_pipe_to_a_loop(repository_root: Path) -> None:
    users = {
        path.name
        for folder in ("cli", "libs", "sdk", "services")
        for path in (repository_root / folder).rglob("src/**/*.py")
        if re.search(r"connect_(read|write)_pipe", path.read_text(encoding="utf-8"))
    }
    assert users == {"pipe_transports.py"}
