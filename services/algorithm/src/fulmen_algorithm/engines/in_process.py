"""The embedded engine in this process, for debugging: the same code behind the same HTTP interface."""

import asyncio
import os

from aiohttp import web

from fulmen_algorithm.engines.embedded.__main__ import arguments, build
from fulmen_algorithm.engines.embedded.generator import Generator
from fulmen_algorithm.engines.engine import EngineFailed, EngineOptions
from fulmen_algorithm.engines.process import EngineProcess, engine_flags
from fulmen_algorithm.runs.ports import PublishedPolicy

STOP_GRACE_S = 5.0


async def start_engine_inside(options: EngineOptions, policy: PublishedPolicy) -> EngineProcess:
    """Starts an engine in this event loop and returns when it listens.

    Raises:
        EngineFailed: if the model cannot be loaded, or the port is in use.
    """
    flags = await engine_flags(options, policy)
    try:
        # The generator belongs to this event loop, which is therefore blocked while the model is loaded.
        generator, server = build(arguments(flags), options.token or None)
    except (OSError, ValueError) as error:
        raise EngineFailed(f"The engine cannot load {policy.path}: {error}") from error
    runner = web.AppRunner(
        server.application(), access_log=None, shutdown_timeout=STOP_GRACE_S, handler_cancellation=True
    )
    await generator.__aenter__()
    try:
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port).start()
    except OSError as error:
        await runner.cleanup()
        await generator.__aexit__(None, None, None)
        raise EngineFailed(f"The engine cannot listen: {error}") from error
    port = int(runner.addresses[0][1])
    return EngineProcess(_Inside(generator, runner), port, options)


class _Inside:
    def __init__(self, generator: Generator, runner: web.AppRunner) -> None:
        self._generator = generator
        self._runner = runner
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def wait(self) -> int:
        """Waits until it is stopped, or can no longer generate."""
        ended = asyncio.create_task(self._ended.wait(), name="engine-ended")
        try:
            await asyncio.wait({ended, self._generator.batcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return 0 if self._ended.is_set() else 1

    async def end(self, *, grace_s: float) -> None:
        """Ends it; harmless if it has ended."""
        if self._ended.is_set():
            return
        self._ended.set()
        async with asyncio.timeout(max(grace_s, STOP_GRACE_S)):
            await self._runner.cleanup()
        await self._generator.__aexit__(None, None, None)
