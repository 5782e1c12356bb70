"""Starts commands through a separate guardian process, so that no command outlives its runner.

Invariant: all descendants of a command are dead when its `KeptCommand.gone` is done, and soon after the runner's death,
even by SIGKILL. On Linux this includes descendants that leave the process group and session; elsewhere only the group.
A trusted agent that kills the guardian or a keeper defeats this; a sandboxed one cannot.
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
from typing import Any

import structlog

from fulmen_runner.agents.command.guardian_main import LENGTH_BYTES, MAX_FILES
from fulmen_runner.agents.command.limits import LimitEnforcer
from fulmen_service_kit.isolation.launch import SCRIPT

START_TIMEOUT_S = 30.0
"""Timeout for starting a command, even on an overloaded machine."""

_SCRIPT = Path(__file__).with_name("guardian_main.py")
_EXIT_TIMEOUT_S = 5.0
_RETRY_PAUSE_S = 0.01
_READ_BYTES = 4096
_START = b"*"
_OWN_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE")
"""Variables inherited by guardian and keepers. Commands can read their environment, so it must not hold the runner's
token."""

_MAX_STARTING = 32
"""Concurrent starts; file descriptors in flight count against the limit of open files."""

_log = structlog.get_logger()


class KeptCommand:
    """A command that was started, with its keeper.

    Attributes:
        keeper: Process id of the keeper, the ancestor of the command and all its descendants.
        exited: Exit code of the command, negative for a signal; None if the keeper was killed.
        gone: Done when the command and all its descendants are dead.
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
        """Sends SIGTERM to the process group."""
        self._order(b"T")

    def kill(self) -> None:
        """Kills the command and all its descendants; wait for `gone`."""
        self._order(b"K")

    async def close(self) -> None:
        """Closes the connection, which kills remaining descendants."""
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
    """The guardian process, started with the first command and restarted if it dies.

    Attributes:
        limits: Enforces the commands' resource limits.
    """

    def __init__(self) -> None:
        self.limits = LimitEnforcer()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Semaphore(_MAX_STARTING)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None,
        environment: Mapping[str, str],
        files: Sequence[int],
        confinement: Mapping[str, Any] | None = None,
    ) -> KeptCommand:
        """Starts a command in a session of its own; `files` become its file descriptors 0, 1 and so on.

        It is confined first, see `Launch.confinement`.

        Raises:
            OSError: If it cannot be started.
            ValueError: If an argument or variable contains a NUL character, or a variable's name is invalid.
        """
        _check(argv, environment)
        if len(files) > MAX_FILES:
            raise ValueError(f"too many file descriptors; at most {MAX_FILES} are allowed")
        request = {
            "argv": list(argv),
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment),
            "confinement": dict(confinement or {}),
        }
        ours, theirs = socket.socketpair()
        try:
            async with asyncio.timeout(START_TIMEOUT_S), self._starting:
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
        """Ends the guardian, which kills all remaining commands."""
        await self.limits.close()
        if self._process is None:
            return
        process, self._process = self._process, None
        self._disconnect()
        try:
            await asyncio.to_thread(process.wait, _EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("guardian_exit_timeout", pid=process.pid)

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
            self._process.wait(_EXIT_TIMEOUT_S)
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT), str(SCRIPT)],
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


async def _start(connection: socket.socket, request: bytes, files: Sequence[int]) -> KeptCommand:
    connection.setblocking(False)
    # Does not block: the connection's buffer is empty.
    socket.send_fds(connection, [len(request).to_bytes(LENGTH_BYTES, "big")], files)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        writer.write(request)
        await writer.drain()
        answer = (await reader.readline()).split()
        if not answer:
            raise OSError(errno.EAGAIN, "keeper process died")
        if answer[0] == b"failed":
            raise OSError(int(answer[1]), os.strerror(int(answer[1])))
    except BaseException:
        await _give_up(reader, writer)
        raise
    return KeptCommand(keeper=int(answer[1]), group=int(answer[2]), streams=(reader, writer))


async def _give_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits until all is dead that the keeper may have started, and closes the connection."""
    try:
        # Without the whole request, it starts nothing.
        if not writer.transport.get_write_buffer_size():
            writer.write_eof()
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                while await reader.read(_READ_BYTES):
                    pass
    except TimeoutError:
        _log.warning("keeper_exit_timeout")
    except OSError:
        # The keeper is dead; the guardian kills the rest.
        pass
    finally:
        # close() would wait until a stuck guardian has read the buffer.
        writer.transport.abort()


def _check(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    if any("\0" in argument for argument in argv):
        raise ValueError("argument contains a NUL character")
    for name, value in environment.items():
        if "\0" in name or "\0" in value:
            raise ValueError(f"variable {name[:64]!r} contains a NUL character")
        if not name or "=" in name:
            raise ValueError(f"{name[:64]!r} is not a valid variable name")
