"""A child process of an event loop.

It is started with the standard library's `subprocess`, which uses vfork: a fork runs grpc's fork handlers in the child,
which sometimes crash before the program is executed.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import IO

from fulmen_service_kit.pipe_transports import read_pipe

_READ_BYTES = 65_536


class Child:
    """A child process, the leader of its own process group."""

    def __init__(self, process: subprocess.Popen[bytes], ended: "asyncio.Future[int]") -> None:
        """Use `start`."""
        self._process = process
        self._ended = ended

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        folder: Path | None = None,
        inherited: Mapping[str, int] = MappingProxyType({}),
    ) -> "Child":
        """Starts a process with an open standard input and this process's standard error.

        Args:
            argv: Program and arguments.
            environment: Complete environment.
            output: Standard output: a file, or `subprocess.PIPE`.
            folder: Working directory; None for this process's.
            inherited: Further descriptors that it inherits, by the variables that name them.

        Raises:
            OSError: if it cannot be started.
        """
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=output,
            env={**environment, **{name: str(number) for name, number in inherited.items()}},
            cwd=folder,
            start_new_session=True,
            pass_fds=tuple(inherited.values()),
        )
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        # A dedicated thread: in the shared pool it would occupy a worker for the life of the process.
        reaper = threading.Thread(target=_reap, args=(process, loop, ended), name=f"reaper-{process.pid}", daemon=True)
        reaper.start()
        return cls(process, ended)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, text: bytes) -> None:
        """Writes a short text to its input.

        Raises:
            OSError: if it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def close_input(self) -> None:
        """Ends its input; idempotent."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    async def first_line(self) -> bytes:
        """Reads one line of its output; empty at the end. A reader that times out must end the process."""
        if self._process.stdout is None:
            return b""
        return await asyncio.to_thread(self._process.stdout.readline)

    async def last_output(self, shown_bytes: int, *, allowed_bytes: int) -> bytes | None:
        """Reads its output to the end and returns the last part; None, and kills it, if it is more than allowed."""
        assert self._process.stdout is not None
        tail = await tail_of(self._process.stdout, shown_bytes, allowed_bytes=allowed_bytes)
        if tail is None:
            self._signal(signal.SIGTERM)
        return tail

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of its output to the end."""
        assert self._process.stdout is not None
        async with _reading(self._process.stdout) as reader:
            while line := await reader.readline():
                yield line

    async def wait(self) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    async def end(self, *, grace_s: float) -> None:
        """Ends it: asks, waits, kills its group."""
        if not self._ended.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._ended}, timeout=grace_s)
        if not self._ended.done():
            self._signal(signal.SIGKILL)
            await asyncio.wait({self._ended})
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        # After it has been reaped, its id may be that of another process. It may be reaped at this moment.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


async def tail_of(pipe: IO[bytes], shown_bytes: int, *, allowed_bytes: int) -> bytes | None:
    """Reads a pipe to its end and returns the last part; None as soon as it is more than allowed."""
    tail, total = b"", 0
    async with _reading(pipe) as reader:
        while part := await reader.read(_READ_BYTES):
            tail, total = (tail + part)[-shown_bytes:], total + len(part)
            if total > allowed_bytes:
                return None
    return tail


@asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """Reads a pipe through the event loop."""
    reader = asyncio.StreamReader()
    copy = FileIO(os.dup(pipe.fileno()), "rb")
    transport = await read_pipe(lambda: asyncio.StreamReaderProtocol(reader), copy)
    try:
        yield reader
    finally:
        transport.close()


def _reap(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[int]") -> None:
    status = process.wait()
    if not loop.is_closed():
        loop.call_soon_threadsafe(_settle, ended, status)


def _settle(ended: "asyncio.Future[int]", status: int) -> None:
    if not ended.done():
        ended.set_result(status)
