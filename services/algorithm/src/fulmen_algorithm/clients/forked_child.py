"""Starts modules of this service as processes: forks of the fork server, which has torch loaded, or fresh ones.

A fork starts in a fraction of a second; a fresh process spends several seconds of CPU on imports.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import MappingProxyType

import structlog

from fulmen_algorithm.clients.child import Child, tail_of
from fulmen_service_kit import launch
from fulmen_service_kit.forks import ForkedProcess, ForkServer, ForkServerLost

PRELOADED = "fulmen_algorithm.preloaded"
STANDARD_ERROR = 2
_log = structlog.get_logger()


class ForkedChild:
    """A forked process with an open standard input; see `Child`."""

    def __init__(self, process: ForkedProcess, output: int) -> None:
        """Use `ModuleStarter.start`."""
        self._process = process
        self._output = open(output, "rb")  # noqa: SIM115  (closed by `end`)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def first_line(self) -> bytes:
        """Reads one line of its output; empty at the end. A reader that times out must end the process."""
        return await asyncio.to_thread(self._output.readline)

    async def last_output(self, shown_bytes: int, *, allowed_bytes: int) -> bytes | None:
        """Reads its output to the end and returns the last part; None, and kills it, if it is more than allowed."""
        tail = await tail_of(self._output, shown_bytes, allowed_bytes=allowed_bytes)
        if tail is None:
            self._process.signal(signal.SIGTERM)
        return tail

    async def wait(self) -> int:
        """Waits for its end; returns its exit status, negative for a signal."""
        return await self._process.wait()

    async def end(self, *, grace_s: float) -> None:
        """Ends it: asks, waits, kills its group."""
        await self._process.end(grace_s=grace_s)
        self._output.close()


ModuleProcess = Child | ForkedChild


class ModuleStarter:
    """Starts `python -m MODULE`."""

    def __init__(self, *, warm: bool, own: bool = True, tied: bool = False) -> None:
        """Starts nothing yet.

        Args:
            warm: Whether it forks, where the system has fork servers.
            own: Whether it may start a fork server, rather than use only one that this process was given.
            tied: Whether fresh processes end with this one, as forks do.
        """
        self._tied = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())] if tied else []
        given = ForkServer.inherited() if warm else None
        own_server = [ForkServer([PRELOADED])] if warm and own else []
        self._servers = [*([given] if given is not None else []), *own_server]

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        quiet: bool = False,
        folder: Path | None = None,
        inherited: Mapping[str, int] = MappingProxyType({}),
    ) -> ModuleProcess:
        """Starts a module with an open standard input and this process's standard error.

        Args:
            module: Module to run.
            arguments: Its arguments.
            environment: Complete environment.
            quiet: Whether its output is discarded, rather than read.
            folder: Working directory; None for this process's.
            inherited: Further descriptors that it inherits, by the variables that name them.

        Raises:
            OSError: if it cannot be started.
        """
        for server in self._servers:
            try:
                return await self._fork(
                    server, module, arguments, environment=environment, quiet=quiet, folder=folder, inherited=inherited
                )
            except ForkServerLost:
                _log.info("not_forked", module=module)
        return Child.start(
            [*self._tied, sys.executable, "-P", "-m", module, *arguments],
            environment=environment,
            output=DEVNULL if quiet else PIPE,
            folder=folder,
            inherited=inherited,
        )

    def close(self) -> None:
        """Ends the fork server."""
        for server in self._servers:
            server.close()

    async def _fork(
        self,
        server: ForkServer,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        quiet: bool,
        folder: Path | None,
        inherited: Mapping[str, int],
    ) -> ForkedChild:
        output, writing = os.pipe()
        if quiet:
            os.close(writing)
            writing = os.open(os.devnull, os.O_WRONLY)
        try:
            process = await server.fork(
                module,
                arguments,
                environment=environment,
                output=writing,
                errors=STANDARD_ERROR,
                folder=folder or Path.cwd(),
                inherited=inherited,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(writing)
        return ForkedChild(process, output)
