"""Starts commands through a process of their own, so that no command outlives its runner.

Invariant: whatever a command starts is dead when its `Kept.gone` is done, and soon after the runner's death, even one by
SIGKILL. On Linux that includes descendants that leave the process group and session; elsewhere only the group is
guaranteed. An agent that kills processes other than its own defeats this: those belong into containers.
"""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from fulmen_runner.agents.command.guardian_main import LENGTH_BYTES, MAX_FILES
from fulmen_runner.agents.command.limits import LimitKeeper

START_DEADLINE_S = 30.0
"""How long a command may take to be started, on a machine that is very busy."""

_SCRIPT = Path(__file__).with_name("guardian_main.py")
_EXIT_DEADLINE_S = 5.0
_RETRY_PAUSE_S = 0.01
_START = b"*"
_OWN_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE")
"""What guardian and keepers get of the runner's environment: any command can read theirs, as the same user's. Never the
runner's token or signing key."""

_STARTING_AT_ONCE = 32
"""File descriptors on their way count against the limit of open files."""

_log = structlog.get_logger()


class Kept:
    """A command that was started.

    Attributes:
        keeper: The process above it; all its descendants are below that.
        exited: Its exit code, negative for a signal; None if its keeper was killed.
        gone: Done when nothing of it is alive.
    """

    def __init__(
        self, *, keeper: int, group: int, streams: "tuple[asyncio.StreamReader, asyncio.StreamWriter]"
    ) -> None:
        loop = asyncio.get_running_loop()
        self.keeper = keeper
        self.exited: asyncio.Future[int | None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._group = group
        self._reader, self._writer = streams
        self._reading = asyncio.create_task(self._read(), name="keeper")

    def terminate(self) -> None:
        """Sends SIGTERM to its process group."""
        self._order(b"T")

    def kill(self) -> None:
        """Kills it with all its descendants; `gone` says when that is done."""
        self._order(b"K")

    async def close(self) -> None:
        """Ends the connection, which kills what is left."""
        self._reading.cancel()
        await asyncio.wait((self._reading,))
        self._writer.close()

    def _order(self, order: bytes) -> None:
        if not self.gone.done():
            self._writer.write(order)

    async def _read(self) -> None:
        try:
            line = await self._reader.readline()
            if line:
                self.exited.set_result(int(line.split()[1]))
                await self._reader.read()
        except ConnectionError:
            pass
        if not self.exited.done():
            _log.warning("keeper_died", pid=self.keeper)
            with suppress(OSError):
                os.killpg(self._group, signal.SIGKILL)
            self.exited.set_result(None)
        self.gone.set_result(None)


class Guardian:
    """The guardian process; it starts with the first command and again should it die.

    Attributes:
        limits: Watches what commands use.
    """

    def __init__(self) -> None:
        self.limits = LimitKeeper()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Semaphore(_STARTING_AT_ONCE)

    async def start(
        self, argv: Sequence[str], *, cwd: Path | None, environment: Mapping[str, str], files: Sequence[int]
    ) -> Kept:
        """Starts a command in a session of its own; `files` become its file descriptors from 0 on.

        Raises:
            OSError: If it cannot be started, for what the error says.
            ValueError: If an argument or a variable holds a NUL character, or a variable's name is none.
        """
        _check(argv, environment)
        if len(files) > MAX_FILES:
            raise ValueError(f"a command gets at most {MAX_FILES} file descriptors")
        request = {"argv": list(argv), "cwd": str(cwd or Path.cwd()), "environment": dict(environment)}
        ours, theirs = socket.socketpair()
        try:
            async with asyncio.timeout(START_DEADLINE_S), self._starting:
                with theirs:
                    await self._hand_over(theirs)
                return await _start(ours, json.dumps(request).encode(), files)
        except TimeoutError:
            ours.close()
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        except BaseException:
            ours.close()
            raise

    async def close(self) -> None:
        """Ends the guardian, which kills what is left."""
        await self.limits.close()
        if self._process is None:
            return
        process, self._process = self._process, None
        self._disconnect()
        try:
            await asyncio.to_thread(process.wait, _EXIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            _log.warning("guardian_still_kills", pid=process.pid)

    async def _hand_over(self, connection: socket.socket) -> None:
        while True:
            with suppress(BlockingIOError):
                if self._send(connection.fileno()):
                    return
                self._restart()
            await asyncio.sleep(_RETRY_PAUSE_S)

    def _send(self, file: int) -> bool:
        if self._socket is None or self._process is None:
            return False
        try:
            socket.send_fds(self._socket, [_START], [file])
        except (BrokenPipeError, ConnectionResetError):
            _log.warning("guardian_died", pid=self._process.pid)
            return False
        return True

    def _restart(self) -> None:
        self._disconnect()
        if self._process is not None:
            self._process.wait(_EXIT_DEADLINE_S)
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT)],
                env={name: os.environ[name] for name in _OWN_VARIABLES if name in os.environ},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def _start(connection: socket.socket, request: bytes, files: Sequence[int]) -> Kept:
    connection.setblocking(False)
    # The first thing on a new connection: there is room for it.
    socket.send_fds(connection, [len(request).to_bytes(LENGTH_BYTES, "big")], files)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        writer.write(request)
        await writer.drain()
        answer = (await reader.readline()).split()
        if not answer:
            raise OSError(errno.EAGAIN, "the process that was to start it ended")
        if answer[0] == b"failed":
            raise OSError(int(answer[1]), os.strerror(int(answer[1])))
    except BaseException:
        # Closing would wait for what a guardian that is stuck does not read, and keep the socket until then.
        writer.transport.abort()
        raise
    return Kept(keeper=int(answer[1]), group=int(answer[2]), streams=(reader, writer))


def _check(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    if any("\0" in argument for argument in argv):
        raise ValueError("an argument holds a NUL character")
    for name, value in environment.items():
        if "\0" in name or "\0" in value:
            raise ValueError(f"the variable {name[:64]!r} holds a NUL character")
        if not name or "=" in name:
            raise ValueError(f"{name[:64]!r} is no name of a variable")
