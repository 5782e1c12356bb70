"""Runs a command with all that it starts: input, bounded output, limits, and its end.

Invariant: when `run_process` returns or raises, nothing that the command started is alive.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Self

from fulmen_runner.agents.command.guardian import Guardian, Kept
from fulmen_runner.agents.command.limits import UNLIMITED, Allowance
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, cut_at_front

TERMINATE_GRACE_S = 2.0
"""How long a group may go on after SIGTERM before SIGKILL."""

PIPE_DEADLINE_S = 1.0
"""How long output is awaited after the group was killed: a process outside the group may hold the pipe."""

_STDOUT, _STDERR = 1, 2

_STDERR_TOLD_BYTES = MAX_MESSAGE_BYTES - 1024
"""How much of the standard error a message has room for beside what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """How much output is kept and how much is allowed, in bytes; and what else a process may use."""

    stdout_kept_bytes: int
    stderr_kept_bytes: int
    output_allowed_bytes: int
    allowance: Allowance = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """How a command ended.

    Attributes:
        exit_code: Negative is the signal that ended it.
        stdout: The end of its standard output.
        stderr: The end of its standard error.
        breach: The limit that it exceeded and was killed for, such as "wrote more than 10 bytes"; empty if none.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    breach: str

    @property
    def failure(self) -> str:
        """Says how it failed, with the end of its standard error; empty if it exited with status 0."""
        if self.breach:
            what = self.breach
        elif self.exit_code < 0:
            what = f"was ended by signal {-self.exit_code} ({_signal_name(-self.exit_code)})"
        elif self.exit_code:
            what = f"exited with status {self.exit_code}"
        else:
            return ""
        # NUL is no character of a text in a database.
        said = self.stderr.decode(errors="replace").replace("\0", "\ufffd")
        return f"{what}.\n{cut_at_front(said, _STDERR_TOLD_BYTES)}".rstrip()


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
        OSError: If it cannot be started at all (no such program, working directory, limits of the system).
        ValueError: If an argument or a variable holds a NUL character.
    """
    reader, writer = os.pipe()
    with FileIO(writer, "wb") as pipe:
        rest = _filled(pipe, stdin)
        try:
            process = await Process.start(
                argv, cwd=cwd, environment=environment, stdin=reader, limits=limits, guardian=guardian
            )
        finally:
            os.close(reader)
        try:
            if rest:
                await process.feed(pipe, rest)
            await process.ended_or_breached()
        finally:
            await process.end()
    return process.result()


class Process:
    """A process with its descendants, its output and its limits.

    Attributes:
        watch: Its output.
        kept: Its end.
        breach: What it exceeded beside output; or that its keeper was killed.
    """

    def __init__(self, kept: Kept, watch: "Watch", limits: ProcessLimits, guardian: Guardian) -> None:
        self.kept, self.watch = kept, watch
        self.breach = guardian.limits.watch(kept.keeper, limits.allowance)
        self._limits, self._guardian = limits, guardian
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        cwd: Path | None,
        environment: Mapping[str, str],
        stdin: int,
        limits: ProcessLimits,
        guardian: Guardian,
        files: Sequence[int] = (),
    ) -> Self:
        """Starts a process; `files` become its file descriptors from 3 on. All of them stay open here.

        Raises:
            OSError: If it cannot be started.
            ValueError: If an argument or a variable holds a NUL character.
        """
        with ExitStack() as ends:
            reads: list[FileIO] = []
            given = [stdin]
            for _ in (_STDOUT, _STDERR):
                read, write = os.pipe()
                reads.append(ends.enter_context(FileIO(read, "rb")))
                given.append(ends.enter_context(FileIO(write, "wb")).fileno())
            kept = await guardian.start(argv, cwd=cwd, environment=environment, files=[*given, *files])
            process = cls(kept, Watch(limits), limits, guardian)
            try:
                for number, stream in zip((_STDOUT, _STDERR), reads, strict=True):
                    await process._read(number, stream)
            except BaseException:
                await process.end()
                raise
        return process

    async def feed(self, pipe: FileIO, data: bytes) -> None:
        """Writes all of the input to a pipe and closes it, while the process runs; which may close its end earlier."""
        writing, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, _taken(pipe))
        self._transports.append(writing)
        writing.write(data)
        writing.write_eof()

    async def _read(self, number: int, pipe: FileIO) -> None:
        stream = partial(_Stream, self.watch, number)
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(stream, _taken(pipe))
        self._transports.append(reading)

    async def ended_or_breached(self) -> None:
        """Returns when it has ended by itself, or has exceeded a limit."""
        await asyncio.wait((self.kept.exited, self.watch.flooded, self.breach), return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> None:
        """Ends it with all its descendants: SIGTERM unless it has ended or exceeded a limit, then SIGKILL."""
        kept = self.kept
        try:
            if not (kept.exited.done() or self.watch.flooded.done() or self.breach.done()):
                kept.terminate()
                await asyncio.wait((kept.exited,), timeout=TERMINATE_GRACE_S)
            # Also after a good end: what the program left behind goes with it.
            kept.kill()
            await asyncio.wait((kept.gone,), timeout=TERMINATE_GRACE_S)
            await asyncio.wait((self.watch.closed,), timeout=PIPE_DEADLINE_S)
        finally:
            self._guardian.limits.forget(kept.keeper)
            for transport in self._transports:
                _abandon(transport)
            await kept.close()

    def result(self) -> ProcessResult:
        """Returns how it ended, after `end`."""
        exit_code = self.kept.exited.result() if self.kept.exited.done() else None
        breach = ""
        if self.watch.flooded.done():
            breach = (
                f"wrote more than {self._limits.output_allowed_bytes} bytes and was killed "
                "(FULMEN_RUNNER_MAX_COMMAND_OUTPUT_BYTES)"
            )
        elif self.breach.done():
            breach = self.breach.result()
        elif exit_code is None:
            breach = "lost the process that watches it, and was killed"
        return ProcessResult(
            exit_code=exit_code or 0,
            stdout=self.watch.tail(_STDOUT),
            stderr=self.watch.tail(_STDERR),
            breach=breach,
        )


class Watch:
    """Keeps the end of the output.

    Attributes:
        closed: Done when nobody can write any more.
        flooded: Done when more was written than is allowed.
    """

    def __init__(self, limits: ProcessLimits) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.flooded: asyncio.Future[None] = loop.create_future()
        self._kept = {_STDOUT: limits.stdout_kept_bytes, _STDERR: limits.stderr_kept_bytes}
        self._allowed = limits.output_allowed_bytes
        self._seen = 0
        self._buffers = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self._open = {_STDOUT, _STDERR}

    def begin(self) -> None:
        """Forgets what was written until now; for processes that are used again."""
        self._seen = 0
        for buffer in self._buffers.values():
            buffer.clear()

    def tail(self, fd: int) -> bytes:
        """Returns the end of a stream."""
        return bytes(self._buffers[fd][-self._kept[fd] :])

    def add(self, fd: int, data: bytes) -> None:
        """Takes output."""
        self._seen += len(data)
        if self._seen > self._allowed and not self.flooded.done():
            self.flooded.set_result(None)
        buffer = self._buffers[fd]
        buffer += data
        if len(buffer) > 2 * self._kept[fd]:
            del buffer[: -self._kept[fd]]

    def close(self, fd: int) -> None:
        """Notes the end of a stream."""
        self._open.discard(fd)
        if not self._open and not self.closed.done():
            self.closed.set_result(None)


class _Stream(asyncio.Protocol):
    """One of the two streams of a process."""

    def __init__(self, watch: Watch, fd: int) -> None:
        self._watch, self._fd = watch, fd

    def data_received(self, data: bytes) -> None:
        self._watch.add(self._fd, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.close(self._fd)


def _filled(pipe: FileIO, data: bytes) -> bytes:
    """Writes what a pipe has room for, and closes it if that is all; returns the rest.

    The end of an input is seen when nobody can write any more: what an agent inside the runner forks has all that is
    open here, for as long as it lives.
    """
    os.set_blocking(pipe.fileno(), False)
    try:
        rest = data[os.write(pipe.fileno(), data) :]
    except BlockingIOError:
        rest = data
    if not rest:
        pipe.close()
    return rest


def _taken(pipe: FileIO) -> FileIO:
    """Moves a pipe to a file of its own: a transport closes what it gets, and in uvloop by its number."""
    taken = FileIO(os.dup(pipe.fileno()), pipe.mode)
    pipe.close()
    return taken


def _abandon(transport: asyncio.BaseTransport) -> None:
    """Closes a pipe; input that nobody read is dropped."""
    if isinstance(transport, asyncio.WriteTransport) and transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
