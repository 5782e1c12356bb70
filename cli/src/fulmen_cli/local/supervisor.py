"""The supervisor of a local stack: starts the services, restarts those that end or hang, and stops all of them.

Once the stack is up, nothing but a request stops it: a service that dies is started again for ever, with a back-off, while
the others run. Run as `python -m fulmen_cli.local.supervisor` by `fulmen_service_kit.heartbeat`, which restarts the
supervisor itself; `fulmen up` starts that. What it does is in `stack.json` after every change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from fulmen_cli.local.errors import ServiceFailedError, StackError
from fulmen_cli.local.fleet import DEFAULT_SLOTS, FleetKeeper, FleetPace, FleetRange
from fulmen_cli.local.ports import LOOPBACK
from fulmen_cli.local.postgres import EmbeddedPostgresError
from fulmen_cli.local.record import ServiceRecord, ServiceState, StackFolder, StackRecord, StackState
from fulmen_cli.local.stack import PRIVATE_UMASK, LocalStack, StackSettings
from fulmen_service_kit.heartbeat import heartbeat
from fulmen_service_kit.standard_streams import never_raise

__all__ = ["RestartPolicy", "Supervisor", "main"]

STABLE_S: Final = 60.0
FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
DATABASE_CHECK_INTERVAL_S: Final = 1.0
TOKEN_INTERVAL_S: Final = 86_400.0
EXIT_FAILED: Final = 1
SLOTS_VARIABLE: Final = "FULMEN_RUNNER_SLOTS"


class RestartPolicy:
    """Decides on the back-off before a dead service restarts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts without crashes.

        Args:
            clock: seconds that only grow.
        """
        self._clock = clock
        self._died_at = -math.inf
        self._backoff_s = FIRST_BACKOFF_S

    def note_death(self) -> float:
        """Records a death; returns the back-off in seconds, which doubles unless the last death was a minute ago."""
        now = self._clock()
        stable = now - self._died_at > STABLE_S + self._backoff_s
        self._backoff_s = FIRST_BACKOFF_S if stable else min(self._backoff_s * 2, MAX_BACKOFF_S)
        self._died_at = now
        return self._backoff_s


class Supervisor:
    """Runs one stack until it is stopped or fails."""

    def __init__(self, settings: StackSettings, *, pace: FleetPace | None = None) -> None:
        """Starts nothing yet. `pace` limits how fast the number of runners changes."""
        self._folder = StackFolder(settings.state_dir.resolve())
        self._settings = settings
        self._pace = pace
        self._stack = LocalStack(settings, on_change=self._write)
        self._stop = asyncio.Event()
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Starts the stack, keeps it alive, and stops it on SIGTERM or SIGINT.

        Raises:
            StackError: if it cannot start; everything is stopped then.
            EmbeddedPostgresError: if the database does not start or stop.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        heartbeat()  # so that no child of this process inherits the pipe
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
        """Starts the stack; returns False if it was stopped meanwhile."""
        starting = asyncio.create_task(self._stack.start(), name="start")
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return True

    async def _keep_alive(self, stopping: asyncio.Task[bool]) -> None:
        """Keeps everything alive until the stack is to stop."""
        heartbeat().start()
        for name in self._stack.service_names:
            self._keep(name, partial(self._keep_service, name))
        self._keep("database", self._keep_database)
        self._keep("client-token", self._keep_client_token)
        if self._settings.max_runners is not None:
            limits = FleetRange(minimum=self._settings.runners, maximum=self._settings.max_runners)
            fleet = FleetKeeper(
                runners=self,
                pace=self._pace or FleetPace(limits),
                store_target=self._stack.targets["store"],
                token=lambda: self._stack.client_token,
                slots_per_runner=self._slots_per_runner(),
            )
            self._keep("fleet", fleet.run)
        await asyncio.wait({stopping})
        for task in self._keepers.values():
            task.cancel()
        await asyncio.wait(self._keepers.values())

    def ready_runners(self) -> dict[str, str]:
        """Returns the targets of the ready runners, by name."""
        return {
            each.name: f"{LOOPBACK}:{each.ports[each.name]}"
            for each in self._stack.record().services
            if _is_runner(each) and each.state is ServiceState.READY
        }

    def runner_count(self) -> int:
        """Returns the number of runners, without draining ones."""
        services = self._stack.record().services
        return sum(_is_runner(each) and each.state is not ServiceState.DRAINING for each in services)

    def draining_runners(self) -> frozenset[str]:
        """Returns the names of the retired runners that have not exited."""
        services = self._stack.record().services
        return frozenset(each.name for each in services if _is_runner(each) and each.state is ServiceState.DRAINING)

    async def start_runner(self) -> None:
        """Starts another runner and keeps it alive.

        Raises:
            ServiceFailedError: if it does not start.
        """
        name = await self._stack.start_spare_runner()
        self._keep(name, partial(self._keep_service, name))

    async def retire_runner(self, name: str) -> None:
        """Marks a runner as draining: it is not restarted."""
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.wait({keeper})
        self._stack.note_draining(name)
        self._keep(name, partial(self._await_end, name))

    def fleet_changed(self, text: str) -> None:
        """Updates the status line of the fleet."""
        self._stack.show_fleet(text)

    def _slots_per_runner(self) -> int:
        inherited = os.environ.get(SLOTS_VARIABLE, "")
        return self._settings.slots or (int(inherited) if inherited.isdecimal() else DEFAULT_SLOTS)

    def _keep(self, name: str, keeper: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def keep() -> None:
            while True:
                try:
                    await keeper()
                except Exception:  # noqa: BLE001  # One that fails must not take the rest of the stack with it.
                    sys.stderr.write(
                        f"keeping {name} failed; tried again in {MAX_BACKOFF_S:.0f} s\n{traceback.format_exc()}"
                    )
                    await asyncio.sleep(MAX_BACKOFF_S)
                else:
                    return

        self._keepers[name] = asyncio.create_task(keep(), name=f"keep-{name}")

    def _write(self, record: StackRecord) -> None:
        try:
            self._folder.write(record)
        except OSError as error:
            sys.stderr.write(f"{self._folder.record_file} cannot be written: {error.strerror}\n")

    async def _await_end(self, name: str) -> None:
        """Waits until a draining runner exits, without a timeout."""
        await self._stack.process(name).wait_or_hang()
        self._stack.forget_service(name)

    async def _keep_service(self, name: str) -> None:
        policy = RestartPolicy()
        while True:
            await self._restart(name, policy, await self._stack.process(name).wait_or_hang())

    async def _restart(self, name: str, policy: RestartPolicy, what: str) -> None:
        while True:
            wait_s = policy.note_death()
            self._stack.note_restart(name, what, retry_in_s=wait_s)
            await asyncio.sleep(wait_s)
            try:
                await self._stack.start_service(name)
            except (ServiceFailedError, OSError) as error:
                what = str(error).splitlines()[0]
            else:
                return

    async def _keep_database(self) -> None:
        while True:
            await asyncio.sleep(DATABASE_CHECK_INTERVAL_S)
            await self._stack.mend_database()

    async def _keep_client_token(self) -> None:
        while True:
            await asyncio.sleep(TOKEN_INTERVAL_S)
            self._stack.renew_client_token()


def _is_runner(service: ServiceRecord) -> bool:
    return service.name.startswith("runner-")


def main() -> None:
    """Runs the supervisor; its one argument is JSON as `fulmen up` writes it."""
    parser = argparse.ArgumentParser(prog="python -m fulmen_cli.local.supervisor", description=__doc__)
    parser.add_argument("settings", help='JSON: {"state_dir": ..., "runners": ..., "slots": ..., "ports": {...}}')
    given = json.loads(parser.parse_args().settings)
    settings = StackSettings(**{**given, "state_dir": Path(given["state_dir"]), "keeper_pid": os.getppid()})
    os.umask(PRIVATE_UMASK)
    never_raise()
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
