"""A service as a child process, which never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from fulmen_cli.local.record import private_opener

if TYPE_CHECKING:
    from fulmen_service_kit.forks import ForkedProcess, ForkServer
    from fulmen_service_kit.heartbeat import Pulse

__all__ = ["ChildProcess", "ForkableServices", "ServiceProcess"]

KILL_LIMIT_S: Final = 10.0


class ServiceProcess(Protocol):
    """A running service: a child process, or a task of this one."""

    @property
    def pid(self) -> int:
        """The id of the process that it runs in."""

    @property
    def exit_status(self) -> int | None:
        """The exit status; negative for a signal; None while it runs."""

    async def wait(self) -> int:
        """Waits for its end and returns its exit status."""

    async def stop(self, grace_s: float) -> int:
        """Asks it to end, waits as long as the grace, then ends it; returns its exit status."""

    async def kill(self) -> int:
        """Kills it immediately; returns its exit status."""

    async def wait_or_hang(self) -> str:
        """Waits for its end, and ends it when it hangs; returns why it ended."""


class ChildProcess:
    """A running child process and its log file."""

    def __init__(self, process: asyncio.subprocess.Process, pulse: Pulse) -> None:
        """Takes over a started process; see `start`."""
        self._process = process
        self._pulse = pulse

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: tuple[str, ...],
        *,
        environment: Mapping[str, str],
        log_file: Path,
        folder: Path,
        inherited: tuple[int, ...] = (),
        umask: int = -1,
    ) -> ChildProcess:
        """Starts `python -m module` (never from the working folder) with exactly this environment; its output is appended to the log file.

        Must be called on the main thread: the kernel ties the child to the thread that starts it. The process keeps the
        inherited descriptors open.
        """
        from fulmen_service_kit import launch
        from fulmen_service_kit.heartbeat import Pulse

        pulse = Pulse()
        program = (sys.executable, "-P", "-m", module, *arguments)
        with open(log_file, "ab", opener=private_opener) as log:  # noqa: ASYNC230  # Opened at once.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(Path(launch.__file__)),
                str(os.getpid()),
                *program,
                env={**environment, **pulse.environment},
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(*inherited, *pulse.descriptors),
                umask=umask,
            )
        pulse.started(process.pid)
        return cls(process, pulse)

    @property
    def pid(self) -> int:
        """The process id; equal to the service's own, because the launcher becomes the service."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status; negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit status."""
        return await self._process.wait()

    async def wait_or_hang(self) -> str:
        """Waits for the end of the process, and ends it when it hangs; returns why it ended."""
        from fulmen_service_kit.heartbeat import ended

        return _describe(await ended(self._process.wait, self._process.send_signal, self._pulse))

    async def stop(self, grace_s: float) -> int:
        """Asks the process to end, waits as long as the grace, then kills it; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                status = await self._process.wait()
        except TimeoutError:
            return await self.kill()
        self._pulse.close()
        return status

    async def kill(self) -> int:
        """Kills the process immediately and waits for its end.

        Raises:
            TimeoutError: if it is still there after 10 s, which means that the kernel holds it.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        async with asyncio.timeout(KILL_LIMIT_S):
            status = await self._process.wait()
        self._pulse.close()
        return status


class ForkableServices:
    """Starts the services of one module again and again: fresh at first, then by forking a process that has it loaded.

    The fork server starts when the service needs it, or one of its own children; see `fulmen_service_kit.forks`.
    """

    def __init__(self, preloaded: str, *, log_file: Path) -> None:
        """Starts nothing.

        Args:
            preloaded: Module that imports all that the service needs.
            log_file: File for the output of the fork server.
        """
        self._preloaded = preloaded
        self._log_file = log_file
        self._server: ForkServer | None = None

    async def start(
        self,
        module: str,
        arguments: tuple[str, ...],
        *,
        environment: Mapping[str, str],
        log_file: Path,
        folder: Path,
        umask: int = -1,
    ) -> ServiceProcess:
        """Starts `python -m module`; see `ChildProcess.start`. A forked process has the umask of the fork server."""
        from fulmen_service_kit.fork_server import CONNECTION_VARIABLE
        from fulmen_service_kit.forks import ForkServer, ForkServerLost
        from fulmen_service_kit.heartbeat import Pulse

        if self._server is None:
            self._server = ForkServer([self._preloaded], log_file=self._log_file)
        if self._server.ready:
            pulse = Pulse()
            with log_file.open("ab") as log, contextlib.suppress(ForkServerLost):
                forked = await self._server.fork(
                    module,
                    arguments,
                    environment=environment,
                    output=log.fileno(),
                    errors=log.fileno(),
                    folder=folder,
                    may_fork=True,
                    inherited=pulse.inherited,
                )
                pulse.started(forked.pid)
                return _ForkedService(forked, pulse)
            pulse.close()
        with self._server.connection() as connection:
            return await ChildProcess.start(
                module,
                arguments,
                environment={**environment, CONNECTION_VARIABLE: str(connection.fileno())},
                log_file=log_file,
                folder=folder,
                inherited=(connection.fileno(),),
                umask=umask,
            )

    def close(self) -> None:
        """Ends the fork server."""
        if self._server is not None:
            self._server.close()


class _ForkedService:
    """A service that the fork server has started."""

    def __init__(self, process: ForkedProcess, pulse: Pulse) -> None:
        self._process = process
        self._pulse = pulse

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status; negative for a signal; None while it runs."""
        return self._process.exit_status

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit status."""
        return await self._process.wait()

    async def wait_or_hang(self) -> str:
        """Waits for the end of the process, and ends it when it hangs; returns why it ended."""
        from fulmen_service_kit.heartbeat import ended

        return _describe(await ended(self._process.wait, self._process.signal, self._pulse))

    async def stop(self, grace_s: float) -> int:
        """Asks the process to end, waits as long as the grace, then kills it; returns its exit status."""
        return await self._process.end(grace_s=grace_s)

    async def kill(self) -> int:
        """Kills the process immediately; returns its exit status."""
        async with asyncio.timeout(KILL_LIMIT_S):
            return await self._process.end(grace_s=0)


def _describe(status: int) -> str:
    from fulmen_service_kit.heartbeat import EXIT_HUNG

    if status == EXIT_HUNG:
        return "hung and was killed"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
