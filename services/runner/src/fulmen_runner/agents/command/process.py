"""Runs a command: input, bounded output, limits and termination.

Invariant: when `run_process` returns or raises, the command and all its descendants are dead.
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

from fulmen_runner.agents.command.guardian import Guardian, KeptCommand
from fulmen_runner.agents.command.limits import UNLIMITED, Allowance
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, cut_at_front
from fulmen_runner.attempts.printed import PrintedTails
from fulmen_service_kit.isolation.launch import Launch
from fulmen_service_kit.pipe_transports import read_pipe, write_pipe

TERMINATE_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""

PIPE_TIMEOUT_S = 1.0
"""Time to read remaining output after the kill: a process outside the group may hold the pipe."""

_STDOUT, _STDERR = 1, 2

_MAX_STDERR_BYTES = MAX_MESSAGE_BYTES - 1024
"""Size of the end of standard error in a failure message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process: output kept and allowed, in bytes, and other resources."""

    stdout_kept_bytes: int
    stderr_kept_bytes: int
    output_allowed_bytes: int
    allowance: Allowance = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """The end of a command.

    Attributes:
        exit_code: Exit code; negative for a signal.
        stdout: End of its standard output.
        stderr: End of its standard error.
        breach: Description of the limit for which it was killed; empty if none.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    breach: str

    @property
    def failure(self) -> str:
        """Reason of the failure with the end of standard error; empty if it exited with status 0."""
        if self.breach:
            reason = self.breach
        elif self.exit_code < 0:
            reason = f"was killed by signal {-self.exit_code} ({_signal_name(-self.exit_code)})"
        elif self.exit_code:
            reason = f"exited with status {self.exit_code}"
        else:
            return ""
        # PostgreSQL text cannot contain NUL.
        stderr = self.stderr.decode(errors="replace").replace("\0", "\ufffd")
        return f"{reason}\n{cut_at_front(stderr, _MAX_STDERR_BYTES)}".rstrip()


def unconfined(argv: Sequence[str]) -> Launch:
    """Returns the launch of a program that nothing confines."""
    return Launch(argv=tuple(argv), confinement={})


async def run_process(
    launch: Launch,
    *,
    cwd: Path | None,
    environment: Mapping[str, str],
    stdin: bytes,
    limits: ProcessLimits,
    guardian: Guardian,
    folders: tuple[Path, ...] = (),
    printed: PrintedTails | None = None,
) -> ProcessResult:
    """Runs a command to its end, and removes its control groups. On cancellation, ends it with SIGTERM, then SIGKILL.

    Its limit of files is the limit of `folders`. `printed` gets the end of its output, however it ends.

    Raises:
        OSError: If it cannot be started.
        ValueError: If an argument or variable contains a NUL character.
    """
    reader, writer = os.pipe()
    with FileIO(writer, "wb") as pipe:
        rest = _filled(pipe, stdin)
        try:
            process = await Process.start(
                launch, cwd=cwd, environment=environment, stdin=reader, limits=limits, guardian=guardian
            )
        finally:
            os.close(reader)
        try:
            process.watch_folders(*folders)
            if rest:
                await process.feed(pipe, rest)
            await process.wait()
        finally:
            try:
                await process.end()
            finally:
                if printed is not None:
                    process.watch.leave(printed)
    return process.result()


class Process:
    """A process with its descendants, output and limits.

    Attributes:
        watch: Its output.
        kept: Its keeper's view of it.
        breach: Description of an exceeded limit other than output.
    """

    def __init__(
        self, kept: KeptCommand, watch: "Watch", limits: ProcessLimits, guardian: Guardian, launch: Launch
    ) -> None:
        self.kept, self.watch = kept, watch
        self.breach = guardian.limits.watch(kept.keeper, limits.allowance)
        self._limits, self._guardian, self._launch = limits, guardian, launch
        self._memory_breach = ""
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def start(
        cls,
        launch: Launch,
        *,
        cwd: Path | None,
        environment: Mapping[str, str],
        stdin: int,
        limits: ProcessLimits,
        guardian: Guardian,
        files: Sequence[int] = (),
    ) -> Self:
        """Starts a process; `files` become its file descriptors 3, 4 and so on. They stay open in the runner.

        Raises:
            OSError: If it cannot be started.
            ValueError: If an argument or variable contains a NUL character.
        """
        with ExitStack() as ends, ExitStack() as undo:
            if launch.cgroup is not None:
                undo.callback(launch.cgroup.remove)
            reads: list[FileIO] = []
            given = [stdin]
            for _ in (_STDOUT, _STDERR):
                read, write = os.pipe()
                reads.append(ends.enter_context(FileIO(read, "rb")))
                given.append(ends.enter_context(FileIO(write, "wb")).fileno())
            kept = await guardian.start(
                launch.argv, cwd=cwd, environment=environment, files=[*given, *files], confinement=launch.confinement
            )
            process = cls(kept, Watch(limits), limits, guardian, launch)
            undo.pop_all()
            try:
                for number, stream in zip((_STDOUT, _STDERR), reads, strict=True):
                    await process._read(number, stream)
            except BaseException:
                await process.end()
                raise
        return process

    async def feed(self, pipe: FileIO, data: bytes) -> None:
        """Writes the rest of the input to a pipe in the background and closes it."""
        writing = await write_pipe(pipe)
        self._transports.append(writing)
        writing.write(data)
        writing.write_eof()

    async def _read(self, number: int, pipe: FileIO) -> None:
        self._transports.append(await read_pipe(partial(_Stream, self.watch, number), pipe))

    def watch_folders(self, *folders: Path) -> None:
        """Counts the files in folders toward its limit."""
        self._guardian.limits.watch_folders(self.kept.keeper, folders)

    async def wait(self) -> None:
        """Waits until it has exited or exceeded a limit."""
        await asyncio.wait((self.kept.exited, self.watch.flooded, self.breach), return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> None:
        """Ends it with all its descendants: SIGTERM unless it has exited or exceeded a limit, then SIGKILL."""
        kept = self.kept
        try:
            if not (kept.exited.done() or self.watch.flooded.done() or self.breach.done()):
                kept.terminate()
                await asyncio.wait((kept.exited,), timeout=TERMINATE_GRACE_S)
            # Also after a normal exit, for its descendants.
            kept.kill()
            await asyncio.wait((kept.gone,), timeout=TERMINATE_GRACE_S)
            await asyncio.wait((self.watch.closed,), timeout=PIPE_TIMEOUT_S)
        finally:
            self._leave_cgroup()
            self._guardian.limits.forget(kept.keeper)
            for transport in self._transports:
                _abandon(transport)
            await kept.close()

    def _leave_cgroup(self) -> None:
        cgroup = self._launch.cgroup
        if cgroup is None:
            return
        if cgroup.has_killed:
            self._memory_breach = self._limits.allowance.memory_breach
        cgroup.remove()

    def result(self) -> ProcessResult:
        """Returns the result, after `end`."""
        exit_code = self.kept.exited.result() if self.kept.exited.done() else None
        breach = ""
        if self.watch.flooded.done():
            breach = (
                f"exceeded the output limit of {self._limits.output_allowed_bytes} bytes "
                "(FULMEN_RUNNER_MAX_COMMAND_OUTPUT_BYTES) and was killed"
            )
        elif self.breach.done():
            breach = self.breach.result()
        elif self._memory_breach:
            breach = self._memory_breach
        elif exit_code is None:
            breach = "was killed because its keeper process died"
        return ProcessResult(
            exit_code=exit_code or 0,
            stdout=self.watch.tail(_STDOUT),
            stderr=self.watch.tail(_STDERR),
            breach=breach,
        )


class Watch:
    """The end of a process's output.

    Attributes:
        closed: Done when both streams are closed.
        flooded: Done when the allowed output is exceeded.
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
        """Discards all output so far, for a process that is reused."""
        self._seen = 0
        for buffer in self._buffers.values():
            buffer.clear()

    def tail(self, fd: int) -> bytes:
        """Returns the end of a stream."""
        return bytes(self._buffers[fd][-self._kept[fd] :])

    def leave(self, printed: PrintedTails) -> None:
        """Leaves the ends of both streams."""
        printed.keep(self.tail(_STDOUT), self.tail(_STDERR))

    def add(self, fd: int, data: bytes) -> None:
        """Appends output of a stream."""
        self._seen += len(data)
        if self._seen > self._allowed and not self.flooded.done():
            self.flooded.set_result(None)
        buffer = self._buffers[fd]
        buffer += data
        if len(buffer) > 2 * self._kept[fd]:
            del buffer[: -self._kept[fd]]

    def close(self, fd: int) -> None:
        """Records the end of a stream."""
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
    """Writes as much as the pipe's buffer takes and closes the pipe if that is all; returns the rest.

    Closed as early as possible: processes forked by in-process agents inherit the open pipe, and the command sees the
    end of its input only when all of them have closed it.
    """
    os.set_blocking(pipe.fileno(), False)
    try:
        rest = data[os.write(pipe.fileno(), data) :]
    except BlockingIOError:
        rest = data
    if not rest:
        pipe.close()
    return rest


def _abandon(transport: asyncio.BaseTransport) -> None:
    """Closes a pipe, dropping unread input."""
    if isinstance(transport, asyncio.WriteTransport) and transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
