"""Keeps a local stack alive: one process that starts the services, restarts what dies, and stops all of it cleanly.

Run as `python -m fulmen.local.supervisor`; `fulmen up` starts it. What it does is in `stack.json` after every change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fulmen.local.errors import ServiceFailedError, StackError
from fulmen.local.postgres import EmbeddedPostgresError
from fulmen.local.record import StackFolder, StackState
from fulmen.local.stack import LocalStack, StackSettings

__all__ = ["RestartPolicy", "Supervisor", "main"]

MOST_DEATHS: Final = 5
DEATH_WINDOW_S: Final = 60.0
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 8.0
DATABASE_CHECK_INTERVAL_S: Final = 5.0
EXIT_FAILED: Final = 1


class RestartPolicy:
    """Decides how long to wait before a service that died is started again, and when to give up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Remembers no deaths yet.

        Args:
            clock: seconds that only grow.
        """
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)

    def note_death(self) -> float | None:
        """Notes a death; returns the wait in seconds, or None after 5 deaths within a minute."""
        now = self._clock()
        self._deaths.append(now)
        recent = [each for each in self._deaths if now - each <= DEATH_WINDOW_S]
        if len(recent) >= MOST_DEATHS:
            return None
        return min(FIRST_BACKOFF_S * 2 ** (len(recent) - 1), LONGEST_BACKOFF_S)


class Supervisor:
    """Runs one stack until it is told to stop or cannot go on."""

    def __init__(self, settings: StackSettings) -> None:
        """Describes the stack; nothing is started yet."""
        self._folder = StackFolder(settings.state_dir.resolve())
        self._stack = LocalStack(settings, on_change=self._folder.write)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Starts the stack, keeps it alive, and stops it on SIGTERM or SIGINT.

        Raises:
            StackError: if it cannot start, or a service dies too often; everything is stopped then.
            EmbeddedPostgresError: if the database does not start, stop or recover.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            if await self._start(stopping):
                await self._keep_alive(stopping)
        except (StackError, EmbeddedPostgresError) as error:
            self._stack.set_state(StackState.STOPPING, str(error))
            await self._stack.stop(state=StackState.FAILED)
            raise
        finally:
            stopping.cancel()
        await self._stack.stop()

    async def _start(self, stopping: asyncio.Task[bool]) -> bool:
        """Starts the stack; returns False if it was told to stop meanwhile."""
        starting = asyncio.create_task(self._stack.start(), name="start")
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return True

    async def _keep_alive(self, stopping: asyncio.Task[bool]) -> None:
        """Returns when the stack is told to stop; raises when a keeper gives up."""
        keepers = [
            asyncio.create_task(self._keep_service(name), name=f"keep-{name}") for name in self._stack.service_names
        ]
        keepers.append(asyncio.create_task(self._keep_database(), name="keep-database"))
        await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        ended = [keeper for keeper in keepers if keeper.done()]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
        for keeper in ended:
            keeper.result()

    async def _keep_service(self, name: str) -> None:
        policy = RestartPolicy()
        while True:
            status = await self._stack.process(name).wait()
            await self._restart(name, policy, _describe(status))

    async def _restart(self, name: str, policy: RestartPolicy, what: str) -> None:
        while True:
            wait_s = policy.note_death()
            if wait_s is None:
                raise ServiceFailedError(
                    f"{name} died {MOST_DEATHS} times within {DEATH_WINDOW_S:.0f} s (last: {what}); the stack was "
                    f"stopped. Its log, {self._folder.log_file(name)}, ends:\n{self._stack.log_tail(name)}"
                )
            self._stack.note_restart(name, what)
            await asyncio.sleep(wait_s)
            try:
                await self._stack.start_service(name)
            except ServiceFailedError as error:
                what = str(error).splitlines()[0]
            else:
                return

    async def _keep_database(self) -> None:
        while True:
            await asyncio.sleep(DATABASE_CHECK_INTERVAL_S)
            await self._stack.check_database()


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def main() -> None:
    """Runs the supervisor; its one argument is JSON as `fulmen up` writes it."""
    parser = argparse.ArgumentParser(prog="python -m fulmen.local.supervisor", description=__doc__)
    parser.add_argument("settings", help='JSON: {"state_dir": ..., "runners": ..., "slots": ..., "ports": {...}}')
    given = json.loads(parser.parse_args().settings)
    settings = StackSettings(**{**given, "state_dir": Path(given["state_dir"])})
    folder = StackFolder(settings.state_dir.resolve())
    folder.create()
    try:
        with folder.hold():
            _run(settings, folder)
    except (StackError, EmbeddedPostgresError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_FAILED)


def _run(settings: StackSettings, folder: StackFolder) -> None:
    folder.record_file.unlink(missing_ok=True)
    supervisor = Supervisor(settings)
    asyncio.run(supervisor.run())


if __name__ == "__main__":
    main()
