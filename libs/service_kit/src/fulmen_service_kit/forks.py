"""Starts processes by forking one that has imported their modules; see `fork_server`."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType

from fulmen_service_kit import fork_server

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
KILL_LIMIT_S = 10.0
READY_LIMIT_S = 10.0
START_LIMIT_S = 90.0
"""Time for a server to answer: one that has imported its modules, and one that imports them first, in seconds."""
TITLE_CHARS = 800
RESTART_PAUSE_S = 60.0
"""Least time between two starts of a server, in seconds."""
KILLED = -int(signal.SIGKILL)


class ForkServerLost(Exception):
    """The fork server has ended, could not start, or does not exist on this system; start the process without it."""


class ForkedProcess:
    """A process that the fork server has started: the leader of its own group."""

    def __init__(self, pid: int, line: tuple[asyncio.StreamReader, asyncio.StreamWriter], stdin: int) -> None:
        """Use `ForkServer.fork`."""
        self.pid = pid
        self._reader, self._writer = line
        self._stdin = stdin
        self._ended = asyncio.create_task(self._watch(), name=f"forked-{pid}")

    @property
    def exit_status(self) -> int | None:
        """Exit status; negative for a signal; None while it runs."""
        if self._ended.cancelled():
            return KILLED
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Waits for its end; returns its exit status."""
        await asyncio.wait({self._ended})
        return KILLED if self._ended.cancelled() else self._ended.result()

    def signal(self, number: int) -> None:
        """Sends a signal to its group, unless it has ended."""
        if not self._ended.done():
            self._writer.write(bytes([number]))

    async def end(self, *, grace_s: float) -> int:
        """Asks it to end, waits, kills its group; returns its exit status."""
        if grace_s > 0:
            self.signal(signal.SIGTERM)
            await asyncio.wait({self._ended}, timeout=grace_s)
        self.signal(signal.SIGKILL)
        await asyncio.wait({self._ended}, timeout=KILL_LIMIT_S)
        if not self._ended.done():
            # The server hangs. It has not reaped the process, whose id is therefore still its own.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ended.cancel()
            return KILLED
        return self._ended.result()

    async def _watch(self) -> int:
        try:
            line = await self._reader.readline()
            # Without a status the server has died, and its processes with it.
            return int(json.loads(line)["status"]) if line else KILLED
        except OSError:
            return KILLED
        finally:
            os.close(self._stdin)
            self._writer.close()


class ForkServer:
    """The fork server of this process, started with the first request; or one that the process was given a connection to."""

    def __init__(self, modules: Sequence[str], *, log_file: Path | None = None) -> None:
        """Starts nothing.

        Args:
            modules: Modules that the server imports; none may start a thread.
            log_file: File for its output; None for this process's standard error.
        """
        self._modules = tuple(modules)
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_s = -RESTART_PAUSE_S
        self._ready = False
        self._waiting: list[socket.socket] = []

    @classmethod
    def inherited(cls) -> "ForkServer | None":
        """Returns the server that this process was given a connection to; None if there is none."""
        descriptor = os.environ.pop(fork_server.CONNECTION_VARIABLE, "")
        if not descriptor.isdecimal():
            return None
        server = cls(())
        try:
            server._control = socket.socket(fileno=int(descriptor))
        except OSError:
            return None
        server._control.set_inheritable(False)
        return server

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run or is another process's."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def ready(self) -> bool:
        """Whether the server runs and its imports are done, so that it can fork immediately."""
        if self.pid is None or self._control is None:
            return False
        if not self._ready:
            with suppress(BlockingIOError):
                self._ready = bool(self._control.recv(1, socket.MSG_DONTWAIT))
        return self._ready

    def start(self) -> None:
        """Starts it before the first request, which then does not wait for the imports."""
        if self._modules and self.pid is None:
            with suppress(ForkServerLost):
                self._start()

    def connection(self) -> socket.socket:
        """Returns a connection for another process, whose first request also starts the server."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.pid is None:
            self._waiting.append(theirs)
            asyncio.get_running_loop().add_reader(theirs, self._woken, theirs)
        else:
            with theirs:
                self._send(fork_server.CONNECT, [theirs.fileno()])
        return ours

    def _woken(self, requester: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(requester)
        self._waiting.remove(requester)
        # A request, or the end of the other process.
        with requester, suppress(ForkServerLost):
            if requester.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._send(fork_server.CONNECT, [requester.fileno()])

    async def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: int,
        errors: int,
        folder: Path,
        may_fork: bool = False,
        inherited: Mapping[str, int] = MappingProxyType({}),
    ) -> ForkedProcess:
        """Starts `python -m module` in a fork of the server; returns when it runs. Its standard input stays open.

        Args:
            module: Module to run.
            arguments: Its arguments.
            environment: Its complete environment, which the server does not see.
            output: Descriptor of its standard output.
            errors: Descriptor of its standard error.
            folder: Its working directory.
            may_fork: Whether it is given a connection to the server.
            inherited: Further descriptors that it inherits, at most two, by the variables that name them.

        Raises:
            ForkServerLost: If there is no server; start the process without it.
        """
        variables = [*([fork_server.CONNECTION_VARIABLE] if may_fork else []), *inherited]
        words = {"module": module, "arguments": list(arguments), "folder": str(folder), "inherited": variables}
        orders = json.dumps({**words, "environment": dict(environment)}).encode()
        ours, theirs = socket.socketpair()
        with ExitStack() as sent:
            orders_out, orders_in = _pipe(sent)
            stdin_out, stdin_in = _pipe(sent)
            sent.enter_context(theirs)
            descriptors = [orders_out, stdin_out, output, errors, theirs.fileno()]
            if may_fork:
                descriptors.append(sent.enter_context(self.connection()).fileno())
            descriptors += inherited.values()
            try:
                self._send(fork_server.FORK, descriptors)
            except ForkServerLost:
                ours.close()
                os.close(orders_in)
                os.close(stdin_in)
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(READY_LIMIT_S if self.ready else START_LIMIT_S):
                await asyncio.to_thread(_write, orders_in, orders)
                line = await reader.readline()
            if not line:
                raise ForkServerLost("The fork server has ended.")
        except TimeoutError as error:
            writer.close()
            os.close(stdin_in)
            raise ForkServerLost("The fork server does not answer.") from error
        except BaseException:
            # The server kills the process when its line is closed.
            writer.close()
            os.close(stdin_in)
            raise
        return ForkedProcess(int(json.loads(line)["pid"]), (reader, writer), stdin_in)

    def close(self) -> None:
        """Ends the server, if this process has started it, and with it every forked process."""
        for requester in self._waiting:
            requester.close()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, kind: bytes, descriptors: list[int]) -> None:
        if self._modules and self.pid is None:
            self._start()
        try:
            if self._control is None:
                raise ForkServerLost("There is no fork server.")
            socket.send_fds(self._control, [kind], descriptors)
        except OSError as error:
            raise ForkServerLost("The fork server has ended.") from error

    def _start(self) -> None:
        now_s = time.monotonic()
        if sys.platform != "linux" or now_s - self._started_s < RESTART_PAUSE_S:
            raise ForkServerLost("There is no fork server.")
        self._started_s, self._ready = now_s, False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The last argument leaves room for the command lines of forked processes, which replace the server's.
        command = (sys.executable, "-P", "-m", "fulmen_service_kit.fork_server", *self._modules, " " * TITLE_CHARS)
        with theirs, ExitStack() as stack:
            log = 2 if self._log_file is None else stack.enter_context(self._log_file.open("ab")).fileno()
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=log, stderr=log, env=_environment(), start_new_session=True
                )
            except OSError as error:
                raise ForkServerLost("The fork server cannot be started.") from error


def _pipe(reading: ExitStack) -> tuple[int, int]:
    """Returns both ends of a pipe; the end to read is closed with the stack."""
    out, into = os.pipe()
    reading.callback(os.close, out)
    return out, into


def _write(pipe: int, content: bytes) -> None:
    with suppress(BrokenPipeError), open(pipe, "wb") as file:
        file.write(content)


def _environment() -> dict[str, str]:
    """Returns this process's environment without settings and secrets."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FULMEN_")
        and name != "PYTHONDONTWRITEBYTECODE"
        and not any(word in name.upper() for word in SECRET_WORDS)
    }
    # A library of numpy would start threads; nothing here computes with numpy.
    return kept | {"OPENBLAS_NUM_THREADS": "1"}
