"""Starts modules of this service as processes: forks of the fork server, which has torch loaded, or fresh ones.

A fork starts in a fraction of a second; a fresh process spends several seconds of CPU on imports.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import MappingProxyType

import structlog

from fulmen_algorithm.clients.child import Child
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

    def __init__(self, *, warm: bool) -> None:
        """Starts nothing yet; `warm` forks, where the system has fork servers."""
        given = ForkServer.inherited() if warm else None
        own = [ForkServer([PRELOADED])] if warm else []
        self._servers = [*([given] if given is not None else []), *own]

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        quiet: bool = False,
        inherited: Mapping[str, int] = MappingProxyType({}),
    ) -> ModuleProcess:
        """Starts a module with an open standard input and this process's standard error.

        Args:
            module: Module to run.
            arguments: Its arguments.
            environment: Complete environment.
            quiet: Whether its output is discarded, rather than read with `first_line`.
            inherited: Further descriptors that it inherits, by the variables that tell it of them.

        Raises:
            OSError: if it cannot be started.
        """
        for server in self._servers:
            try:
                return await self._fork(server, module, arguments, environment, quiet, inherited)
            except ForkServerLost:
                _log.info("not_forked", module=module)
        return Child.start(
            [sys.executable, "-m", module, *arguments],
            environment=environment,
            output=DEVNULL if quiet else PIPE,
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
        environment: Mapping[str, str],
        quiet: bool,
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
                folder=Path.cwd(),
                inherited=inherited,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(writing)
        return ForkedChild(process, output)
