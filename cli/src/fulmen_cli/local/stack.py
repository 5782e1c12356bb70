"""The processes of one local stack: database, store, proxy, algorithm, runners; started in order, stopped in reverse.

Knows how to start and end each by itself, and nothing about restarts: `supervisor` decides those, and so may a test.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from fulmen_cli.local.credentials import Credentials
from fulmen_cli.local.errors import ServiceFailedError
from fulmen_cli.local.health import wait_until_serving
from fulmen_cli.local.ports import DEFAULT_PORTS, PortChooser
from fulmen_cli.local.postgres import UNANSWERED, EmbeddedPostgres, EmbeddedPostgresError
from fulmen_cli.local.process import ChildProcess, ForkableServices, ServiceProcess
from fulmen_cli.local.record import ServiceRecord, ServiceState, StackFolder, StackRecord, StackState
from fulmen_cli.local.services import (
    PRELOADED,
    ServiceSpec,
    StackPlan,
    plan_services,
    port_names,
    require_installed,
    runner_names,
    targets_of,
)

__all__ = ["PRIVATE_UMASK", "LocalStack", "StackSettings"]

ResultT = TypeVar("ResultT")

READY_LIMIT_S: Final = 90.0
# Longer than the longest drain grace of a service (the runner: 30 s).
STOP_GRACE_S: Final = 45.0
DATABASE: Final = "database"
FORK_SERVER: Final = "fork-server"
RUNNERS_PROJECTS: Final = "FULMEN_RUNNER_PROJECTS"
LOG_TAIL_LINES: Final = 15
PRIVATE_UMASK: Final = 0o077
AGENTS_UMASK: Final = 0o022
# Small: the whole stack shares one machine, and the demo's database is a few MB.
DATABASE_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({"shared_buffers": "64MB", "max_connections": "60"})


class LocalStack:
    """The processes of one stack. Main thread only."""

    def __init__(
        self,
        settings: StackSettings,
        *,
        rng: random.Random | None = None,
        on_change: Callable[[StackRecord], None] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: what the caller decides.
            rng: where the search for free ports begins.
            on_change: is given the record of the stack after every change.
        """
        self._settings = settings
        self.folder = StackFolder(settings.state_dir.resolve())
        self._port_chooser = PortChooser(rng or random.Random())
        self._on_change = on_change
        self._specs: dict[str, ServiceSpec] = {}
        self._processes: dict[str, ServiceProcess] = {}
        self._records: dict[str, ServiceRecord] = {}
        self._postgres: EmbeddedPostgres | None = None
        self._credentials = Credentials(self.folder.path)
        self._forkable = ForkableServices(PRELOADED, log_file=self.folder.log_file(FORK_SERVER))
        self._state = StackState.STARTING
        self._message = ""
        self._fleet = ""
        self._started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._ports: dict[str, int] = {}
        self._database_lock = asyncio.Lock()

    @property
    def service_names(self) -> list[str]:
        """The services in the order in which they start; the database and spare runners are not among them."""
        return [name for name in self._specs if name in self._records]

    @property
    def targets(self) -> dict[str, str]:
        """Where clients reach each service; known once `prepare` has returned."""
        return targets_of(self._ports)

    @property
    def client_token(self) -> str:
        """The token that the command line uses."""
        return self._credentials.client_token_file.read_text(encoding="utf-8").strip()

    def renew_client_token(self) -> None:
        """Issues the token that the command line uses again; the one before stays valid until it expires."""
        self._credentials.renew_client_token()

    def spec(self, name: str) -> ServiceSpec:
        """Returns how a service is started."""
        return self._specs[name]

    def process(self, name: str) -> ServiceProcess:
        """Returns the running process of a service; raises KeyError if it was not started."""
        return self._processes[name]

    async def prepare(self) -> None:
        """Chooses ports, starts the database, creates keys and tokens; starts no service.

        Raises:
            StackError: if something is missing or taken.
            EmbeddedPostgresError: if the database does not start.
        """
        require_installed()
        self.folder.create()
        names = port_names(self._settings.room_for_runners)
        self._ports = self._port_chooser.choose(names, self._settings.ports, self._preferred_ports())
        self.folder.keep_ports(self._ports)
        self._postgres = EmbeddedPostgres(self.folder.database, settings=dict(DATABASE_SETTINGS))
        self._set(DATABASE, state=ServiceState.STARTING, log=str(self._postgres.log_file))
        for name in ("store", "llm_proxy", "algorithm"):
            self._set(name, state=ServiceState.WAITING)
        await self._on_database(self._postgres.start)
        database_url = self._postgres.dsn
        self._set(DATABASE, state=ServiceState.READY)
        specs = plan_services(self._plan(database_url), {**os.environ, **self._settings.environment})
        self._specs = {spec.name: spec for spec in specs}
        spare = runner_names(self._settings.room_for_runners)[self._settings.runners :]
        for spec in specs:
            if spec.name not in spare:
                self._plan_to_start(spec)

    async def start(self) -> None:
        """Starts all services and returns when they are ready.

        The store starts first, because the others call it immediately; then the others start at the same time.

        Raises:
            StackError: if something is missing, taken, or does not become ready; call `stop` then.
            EmbeddedPostgresError: if the database does not start.
        """
        await self.prepare()
        first, *others = self.service_names
        await self.start_service(first)
        for name in others:
            await self._launch(name)
        try:
            async with asyncio.TaskGroup() as group:
                for name in others:
                    group.create_task(self._await_ready(name), name=f"await-{name}")
        except* ServiceFailedError as failures:
            raise failures.exceptions[0] from None
        self.set_state(StackState.READY)

    async def start_service(self, name: str) -> None:
        """Starts a service and returns when it is ready.

        Raises:
            ServiceFailedError: if it ends, or does not serve within 90 s; it is dead then.
        """
        await self._launch(name)
        await self._await_ready(name)

    async def start_spare_runner(self) -> str:
        """Starts another runner and returns its name when it is ready.

        Raises:
            ServiceFailedError: if there is no room for one, or as `start_service`.
        """
        spare = [name for name, spec in self._specs.items() if spec.kind == "runner" and name not in self._records]
        if not spare:
            raise ServiceFailedError("No port is left for another runner.")
        name = spare[0]
        self._plan_to_start(self._specs[name])
        try:
            await self.start_service(name)
        except ServiceFailedError:
            self.forget_service(name)
            raise
        return name

    def note_draining(self, name: str) -> None:
        """Marks a service as draining."""
        self._set(name, state=ServiceState.DRAINING)

    def forget_service(self, name: str) -> None:
        """Removes an exited service from the record; its runner is spare again."""
        self._processes.pop(name, None)
        self._records.pop(name, None)
        self._announce()

    def show_fleet(self, text: str) -> None:
        """Updates the status line of the fleet."""
        if text != self._fleet:
            self._fleet = text
            self._announce()

    def _plan_to_start(self, spec: ServiceSpec) -> None:
        log = str(self.folder.log_file(spec.name))
        self._set(spec.name, state=ServiceState.WAITING, ports=spec.ports, log=log)

    async def stop_service(self, name: str, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stops a service with SIGTERM; kills it after the grace."""
        process = self._processes.pop(name, None)
        if process is not None:
            await process.stop(grace_s)
        self._set(name, state=ServiceState.STOPPED, pid=None)

    async def kill_service(self, name: str) -> None:
        """Kills a service and waits for its exit."""
        process = self._processes.pop(name)
        await process.kill()
        self._set(name, state=ServiceState.STOPPED, pid=None)

    async def stop(self, *, state: StackState = StackState.STOPPED) -> None:
        """Stops all services in reverse order, runners concurrently."""
        if state is StackState.STOPPED:
            self.set_state(StackState.STOPPING)
        runners = [name for name in self._processes if self._specs[name].kind == "runner"]
        await asyncio.gather(*(self.stop_service(name) for name in runners))
        for name in reversed(list(self._processes)):
            await self.stop_service(name)
        self._forkable.close()
        if self._postgres is not None:
            self._postgres.give_up()
            await self._on_database(self._postgres.stop)
            self._set(DATABASE, state=ServiceState.STOPPED)
        self._port_chooser.release()
        self.set_state(state)

    async def check_database(self) -> None:
        """Restarts the database if need be, and waits for it; raises `EmbeddedPostgresError` if it does not recover."""
        if self._postgres is not None:
            await self._on_database(self._postgres.start)

    async def mend_database(self) -> None:
        """Does what the started database needs next to accept connections; never waits for its recovery."""
        assert self._postgres is not None
        try:
            problem = await self._on_database(self._postgres.mend)
        except (EmbeddedPostgresError, OSError) as error:
            problem = str(error).splitlines()[0]
        was_ready = self._records[DATABASE].state is ServiceState.READY
        if not problem and not was_ready:
            self._set(DATABASE, state=ServiceState.READY)
        elif problem and was_ready and problem != UNANSWERED:
            self.note_restart(DATABASE, problem)

    async def kill_database(self) -> None:
        """Kills the database as a power cut would; `check_database` recovers it."""
        if self._postgres is not None:
            await self._on_database(self._postgres.kill)

    def set_state(self, state: StackState, message: str | None = None) -> None:
        """Sets the state of the stack."""
        self._state = state
        self._message = self._message if message is None else message
        self._announce()

    def note_restart(self, name: str, message: str, *, retry_in_s: float = 0.0) -> None:
        """Marks a dead service as restarting, immediately or later."""
        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=retry_in_s)
        retry_at, restarts = at.isoformat(timespec="seconds"), self._records[name].restarts + 1
        self._set(name, state=ServiceState.RESTARTING, restarts=restarts, message=message, retry_at=retry_at)

    def log_tail(self, name: str) -> str:
        """Returns the last lines of a service's log."""
        path = self.folder.log_file(name)
        if not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def record(self) -> StackRecord:
        """Returns the record of the stack."""
        return StackRecord(
            state=self._state,
            supervisor_pid=os.getpid(),
            version=metadata.version("fulmen"),
            targets=self.targets if self._ports else {},
            client_token_file=str(self._credentials.client_token_file),
            services=tuple(self._records.values()),
            started_at=self._started_at,
            message=self._message,
            fleet=self._fleet,
            keeper_pid=self._settings.keeper_pid,
        )

    async def _on_database(self, work: Callable[[], ResultT]) -> ResultT:
        """Runs a slow operation on the database: one at a time, to its end even if the caller is cancelled."""

        async def alone() -> ResultT:
            async with self._database_lock:
                return await asyncio.to_thread(work)

        return await asyncio.shield(asyncio.create_task(alone(), name="database"))

    async def _launch(self, name: str) -> None:
        spec = self._specs[name]
        self._ready_file(name).unlink(missing_ok=True)
        process = await self.start_process(spec)
        self._processes[name] = process
        self._set(name, state=ServiceState.STARTING, pid=process.pid)

    async def start_process(self, spec: ServiceSpec) -> ServiceProcess:
        """Starts a service without waiting for it. Overridden by stacks that do not use child processes."""
        start = self._forkable.start if spec.is_forkable else ChildProcess.start
        return await start(
            spec.module,
            ("serve",),
            environment=spec.environment,
            log_file=self.folder.log_file(spec.name),
            folder=self.folder.path,
            # Files of services are private. Agents choose the modes of their own, which may be read by other users.
            umask=AGENTS_UMASK if spec.kind == "runner" else PRIVATE_UMASK,
        )

    async def _await_ready(self, name: str) -> None:
        process = self._processes[name]
        ready = asyncio.ensure_future(
            wait_until_serving(self._ready_file(name), process.pid, self._specs[name].target, timeout_s=READY_LIMIT_S)
        )
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._failed(name, f"ended with status {ended.result()} before it served")
            if ready.exception() is not None:
                await process.kill()
                raise self._failed(name, f"did not serve within {READY_LIMIT_S:.0f} s")
        finally:
            ready.cancel()
            ended.cancel()
        self._set(name, state=ServiceState.READY)

    def _failed(self, name: str, what: str) -> ServiceFailedError:
        self._processes.pop(name, None)
        self._set(name, state=ServiceState.FAILED, pid=None, message=what)
        tail = self.log_tail(name)
        return ServiceFailedError(
            f"{name} {what}. Its log, {self.folder.log_file(name)}, ends:\n{tail}" if tail else f"{name} {what}."
        )

    def _plan(self, database_url: str) -> StackPlan:
        self._credentials.signing_key()
        self.renew_client_token()
        return StackPlan(
            folder=self.folder.path,
            ports=self._ports,
            runners=self._settings.room_for_runners,
            slots=self._settings.slots,
            database_url=database_url,
            signing_key_file=self._credentials.signing_key_file.resolve(),
            engine_token=self._credentials.engine_token(),
            attempt_secret_file=self._credentials.attempt_secret_file().resolve(),
            token_files={
                "service": self._credentials.token_file("service").resolve(),
                "runner": self._credentials.token_file("runner", project=self._only_project()).resolve(),
            },
        )

    def _only_project(self) -> str | None:
        """Returns the project of runners that are set to serve one only; None if they serve several or all."""
        served = {**os.environ, **self._settings.environment}.get(RUNNERS_PROJECTS, "").strip()
        return None if "," in served else served or None

    def _preferred_ports(self) -> dict[str, int]:
        # Prefer the ports of the last start: commands that wait for the stack to return know no others.
        last = self.folder.last_ports()
        if not self._settings.use_default_ports:
            return last
        names = port_names(self._settings.room_for_runners)
        usual = {name: DEFAULT_PORTS[name] for name in names if name in DEFAULT_PORTS}
        usual |= {"runner-1": DEFAULT_PORTS["runner"], "runner-1_metrics": DEFAULT_PORTS["runner_metrics"]}
        return usual | last

    def _ready_file(self, name: str) -> Path:
        return self.folder.ready_files / f"{name}.json"

    def _set(
        self,
        name: str,
        *,
        state: ServiceState,
        ports: dict[str, int] | None = None,
        pid: int | None = None,
        log: str | None = None,
        restarts: int | None = None,
        message: str | None = None,
        retry_at: str = "",
    ) -> None:
        known = self._records.get(name) or ServiceRecord(name=name, state=state, ports={})
        self._records[name] = replace(
            known,
            state=state,
            ports=known.ports if ports is None else ports,
            pid=pid if pid is not None or state in _WITHOUT_PROCESS else known.pid,
            log=known.log if log is None else log,
            restarts=known.restarts if restarts is None else restarts,
            message=known.message if message is None else message,
            retry_at=retry_at,
        )
        self._announce()

    def _announce(self) -> None:
        if self._on_change is not None:
            self._on_change(self.record())


_WITHOUT_PROCESS: Final = frozenset(
    {ServiceState.WAITING, ServiceState.RESTARTING, ServiceState.STOPPED, ServiceState.FAILED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """Settings of a local stack.

    Attributes:
        state_dir: State directory.
        runners: Initial number of runners, at least 1.
        max_runners: Maximum number of runners; by default `runners`.
        slots: Slots of each runner; by default the runner's own setting.
        ports: Requested ports, by name; others are the last ones, the defaults, or free ones.
        use_default_ports: Whether to try the default ports; tests do not.
        environment: Additional variables for the services.
        keeper_pid: Process that restarts the supervisor; 0 if none does.
    """

    state_dir: Path
    runners: int = 1
    max_runners: int | None = None
    slots: int | None = None
    ports: dict[str, int] = field(default_factory=dict)
    use_default_ports: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    keeper_pid: int = 0

    @property
    def room_for_runners(self) -> int:
        """Number of runners with ports."""
        return max(self.runners, self.max_runners or 0)
