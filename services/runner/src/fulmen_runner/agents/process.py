"""Runs a command as a process group of its own: input, bounded output, and its end.

Invariant: when `run_process` returns or raises, no process of the group is alive.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fulmen_runner.agents.guardian import Guardian

TERMINATE_GRACE_S = 2.0
"""How long a group may go on after SIGTERM before SIGKILL."""

PIPE_DEADLINE_S = 1.0
"""How long output is awaited after the group was killed: a process outside the group may hold the pipe."""

# The program waits for a line that comes once the guardian knows its group; if the runner dies before that, the input
# ends and the program never starts. `read` takes the line and nothing after it.
GATE = ("/bin/sh", "-c", 'read -r _ && exec "$@"', "sh")
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """How much output is kept and how much is allowed, in bytes."""

    stdout_kept_bytes: int
    stderr_kept_bytes: int
    output_allowed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """How a command ended.

    Attributes:
        exit_code: Negative is the signal that ended it.
        stdout: The end of its standard output.
        stderr: The end of its standard error.
        flooded: True if it was killed because it wrote more than is allowed.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    flooded: bool


async def run_process(
    argv: Sequence[str],
    *,
    cwd: Path | None,
    environment: Mapping[str, str],
    stdin: bytes,
    limits: ProcessLimits,
    guardian: Guardian,
) -> ProcessResult:
    """Runs a command to its end; being cancelled, it ends the group: SIGTERM, then SIGKILL.

    Raises:
        OSError: If it cannot be started at all (working directory, limits of the system).
    """
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    try:
        transport, watch = await loop.subprocess_exec(
            lambda: Watch(limits),
            *GATE,
            *argv,
            stdin=reader,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    pipe = os.fdopen(writer, "wb", 0)
    group = transport.get_pid()
    guardian.watch(group)
    feeding = asyncio.create_task(_feed(pipe, b"\n" + stdin), name="stdin")
    try:
        await asyncio.wait((watch.exited, watch.flooded), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_group(group, watch)
        feeding.cancel()
        await asyncio.wait((feeding,), timeout=PIPE_DEADLINE_S)
        await asyncio.wait((watch.closed,), timeout=PIPE_DEADLINE_S)
        pipe.close()
        transport.close()
        guardian.forget(group)
    return ProcessResult(
        exit_code=transport.get_returncode() or 0,
        stdout=watch.tail(_STDOUT),
        stderr=watch.tail(_STDERR),
        flooded=watch.flooded.done(),
    )


async def end_group(group: int, watch: "Watch") -> None:
    """Ends a process group: SIGTERM unless its leader has ended, then SIGKILL."""
    if not watch.exited.done() and not watch.flooded.done():
        _signal_group(group, signal.SIGTERM)
        await asyncio.wait((watch.exited,), timeout=TERMINATE_GRACE_S)
    # Also after a good end: what the program left behind in its group goes with it.
    _signal_group(group, signal.SIGKILL)
    await asyncio.wait((watch.exited,), timeout=TERMINATE_GRACE_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
    except PermissionError:
        # macOS says so of a group that holds only a zombie.
        return


class Watch(asyncio.SubprocessProtocol):
    """Keeps the end of the output and knows when the process has ended."""

    def __init__(self, limits: ProcessLimits) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.flooded: asyncio.Future[None] = loop.create_future()
        self._kept = {_STDOUT: limits.stdout_kept_bytes, _STDERR: limits.stderr_kept_bytes}
        self._allowed = limits.output_allowed_bytes
        self._seen = 0
        self._buffers = {_STDOUT: bytearray(), _STDERR: bytearray()}

    def begin(self) -> None:
        """Forgets what was written until now; for processes that are used again."""
        self._seen = 0
        for buffer in self._buffers.values():
            buffer.clear()

    def tail(self, fd: int) -> bytes:
        """Returns the end of a stream."""
        return bytes(self._buffers[fd][-self._kept[fd] :])

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._seen += len(data)
        if self._seen > self._allowed and not self.flooded.done():
            self.flooded.set_result(None)
        buffer = self._buffers[fd]
        buffer += data
        if len(buffer) > 2 * self._kept[fd]:
            del buffer[: -self._kept[fd]]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class _PipeWriter(asyncio.Protocol):
    """Waits until a pipe has room, and notices when nobody reads it."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def _feed(pipe: BinaryIO, data: bytes) -> None:
    """Writes all of the input to the pipe and closes it; the process may close its end earlier."""
    transport, protocol = await asyncio.get_running_loop().connect_write_pipe(_PipeWriter, pipe)
    try:
        transport.write(data)
        transport.write_eof()
        await protocol.closed
    finally:
        transport.abort()
