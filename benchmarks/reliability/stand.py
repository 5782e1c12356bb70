"""The stack that is harmed: `fulmen up` as a user starts it, its processes as its record names them, and its database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from benchmarks.reliability.plan import Victim
from fulmen.rpc.services import Targets
from fulmen_cli.local.health import is_serving
from fulmen_cli.local.ports import LOOPBACK
from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_cli.local.record import ServiceState, StackFolder, StackRecord, StackState

__all__ = ["Stand", "StandFailed", "free_port", "is_alive", "send", "short_folder"]

UP_LIMIT_S = 240.0
QUERY_LIMIT_S = 2.0
HEALTHY_LIMIT_S = 120.0
POLL_INTERVAL_S = 0.1
RUNNERS, SLOTS = 2, 4
AGGREGATOR_BACKOFF_S = 0.5
CONFUSED = (asyncpg.InterfaceError, asyncpg.InternalClientError, AttributeError)
"""What the driver raises if a connection ends between two steps of a statement: it accesses an attribute that is gone."""
REPOSITORY = Path(__file__).parents[2]
CLOCKS = Path(__file__).parent / "clock"
DISKS = {".": 768, "algorithm": 256, "llm_proxy": 64}
"""Folders of a stack that have a file system of their own in memory, and their size in MiB; the first holds PostgreSQL's."""


class StandFailed(Exception):
    """The stack does not start, or does not become healthy again."""


@dataclass(slots=True)
class Stand:
    """A stack in a folder.

    Attributes:
        folder: Where all is; the stack's state is in `s`.
        aggregator_port: Port of the server of gradient sums that stands beside the stack.
        kind: `plain`, `clock` (each process has a clock of its own) or `disk` (folders on file systems of their own).
    """

    folder: Path
    kind: str = "plain"
    aggregator_port: int = field(default_factory=lambda: free_port())
    _aggregator: subprocess.Popen[bytes] | None = None
    _keeping: asyncio.Task[None] | None = None
    _database: asyncpg.Connection | None = None
    _mounted: list[Path] = field(default_factory=list)

    @property
    def state(self) -> StackFolder:
        """The state folder of the stack."""
        return StackFolder(self.folder / "s")

    @property
    def clocks(self) -> Path:
        """Holds one file per process whose clock is wrong."""
        return self.folder / "clocks"

    def record(self) -> StackRecord | None:
        """The record of the stack; None while there is none."""
        return self.state.read()

    @property
    def targets(self) -> Targets:
        """Where the services listen."""
        targets = self._known().targets
        return Targets(store=targets["store"], algorithm=targets["algorithm"], llm_proxy=targets["llm_proxy"])

    @property
    def token(self) -> str:
        """The token of the user of the machine."""
        return Path(self._known().client_token_file).read_text(encoding="utf-8").strip()

    def _known(self) -> StackRecord:
        record = self.record()
        if record is None or not record.targets:
            raise StandFailed("The stack has no record.")
        return record

    async def up(self) -> float:
        """Starts the stack, or what is left of it; returns how many seconds that took.

        Raises:
            StandFailed: if it does not become ready.
        """
        began = time.monotonic()
        if self.kind == "disk" and not self._mounted:
            self._mount()
        command = [sys.executable, "-m", "fulmen_cli", "up", "--state-dir", str(self.state.path)]
        command += ["--runners", str(RUNNERS), "--slots", str(SLOTS)]
        done = await asyncio.to_thread(
            subprocess.run, command, env=self._environment(), cwd=REPOSITORY, capture_output=True, timeout=UP_LIMIT_S,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise StandFailed(f"`fulmen up` failed: {(done.stdout + done.stderr).decode(errors='replace')[-800:]}")
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_aggregator(), name="aggregator")
        return time.monotonic() - began

    def _environment(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith("FULMEN_")}
        given["FULMEN_ALGORITHM_EXCHANGE_TARGETS"] = f'{{"127.0.0.1:{self.aggregator_port}": ""}}'
        # A run of a cell begins while the engine of the last one is warm.
        given["FULMEN_ALGORITHM_MAX_CONCURRENT_RUNS"] = "2"
        if self.kind == "clock":
            self.clocks.mkdir(exist_ok=True)
            path = os.pathsep.join(filter(None, [str(CLOCKS), given.get("PYTHONPATH", "")]))
            given |= {"CRASH_MATRIX_CLOCKS": str(self.clocks), "PYTHONPATH": path}
        return given

    def _mount(self) -> None:
        for name, size_mib in DISKS.items():
            place = self.state.path / name
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=755", "fulmen-matrix", str(place)], check=True
            )
            self._mounted.append(place)

    def _unmount(self) -> None:
        for place in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", str(place)], check=False)
        self._mounted.clear()

    async def _keep_aggregator(self) -> None:
        """Starts the aggregator again whenever it ends, as a supervisor would."""
        sums = self.folder / "sums"
        sums.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.reliability.aggregator", str(sums)]
        while True:
            self._aggregator = await asyncio.to_thread(self._start_aggregator, command)
            while self._aggregator.poll() is None:
                await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.sleep(AGGREGATOR_BACKOFF_S)

    def _start_aggregator(self, command: list[str]) -> subprocess.Popen[bytes]:
        own = {"PORT": str(self.aggregator_port), "SIGNING_KEY_FILE": str(self.state.path / "signing.key")}
        own["LOG_LEVEL"] = "warning"
        environment = {**os.environ, **{f"FULMEN_MATRIX_AGGREGATOR_{name}": value for name, value in own.items()}}
        with (self.folder / "aggregator.log").open("ab") as log:
            return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)

    async def abandon(self) -> None:
        """Forgets a stack whose processes are ended by others."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._aggregator is not None:
            self._aggregator.kill()
            self._aggregator.wait()
            self._aggregator = None
        await self.forget_database()

    async def down(self) -> None:
        """Ends the stack and all its processes, and removes its folder."""
        await self.abandon()
        command = [sys.executable, "-m", "fulmen_cli", "down", "--state-dir", str(self.state.path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(
                subprocess.run, command, cwd=REPOSITORY, capture_output=True, timeout=UP_LIMIT_S, check=False
            )
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.to_thread(self._unmount)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def healthy(self, limit_s: float = HEALTHY_LIMIT_S) -> None:
        """Waits until every part of the stack is ready and answers.

        Raises:
            StandFailed: if that takes longer.
        """
        deadline = time.monotonic() + limit_s
        why = "no record"
        while time.monotonic() < deadline:
            record = self.record()
            if record is not None and self.state.is_running() and record.state is StackState.READY:
                waiting = [each.name for each in record.services if each.state is not ServiceState.READY]
                waiting += [name for name, serves in (await self.readiness()).items() if not serves]
                if not waiting:
                    return
                why = f"not ready: {', '.join(waiting)}"
            elif record is not None:
                why = f"the stack is {record.state}: {record.message[:300]}"
            await asyncio.sleep(POLL_INTERVAL_S)
        raise StandFailed(why)

    async def readiness(self, *, but: tuple[Victim, ...] = ()) -> dict[str, bool]:
        """Asks the services whether they serve, apart from some."""
        record = self.record()
        asked = [each for each in record.services if each.ports and each.name not in but] if record else []
        answers = await asyncio.gather(*(is_serving(f"{LOOPBACK}:{each.ports[each.name]}") for each in asked))
        return dict(zip((each.name for each in asked), answers, strict=True))

    async def query(self, sql: str, *arguments: object) -> list[Any]:
        """Asks PostgreSQL directly, beside all services.

        Raises:
            OSError: if it does not answer.
        """
        try:
            async with asyncio.timeout(QUERY_LIMIT_S):
                if self._database is None or self._database.is_closed():
                    self._database = await asyncpg.connect(EmbeddedPostgres(self.state.database).dsn)
                return list(await self._database.fetch(sql, *arguments))
        except (OSError, TimeoutError, asyncpg.PostgresError, *CONFUSED) as error:
            await self.forget_database()
            raise OSError(str(error)) from error

    async def forget_database(self) -> None:
        """Closes the connection to PostgreSQL."""
        if self._database is not None:
            self._database.terminate()
            self._database = None

    async def pid(self, victim: Victim) -> int | None:
        """Finds the process of a victim; None while it has none."""
        record = self.record()
        match victim:
            case Victim.SUPERVISOR:
                return record.supervisor_pid if record and self.state.is_running() else None
            case Victim.POSTMASTER:
                return self._postmaster()
            case Victim.BACKEND:
                return await self._backend()
            case Victim.AGGREGATOR:
                return self._aggregator.pid if self._aggregator and self._aggregator.poll() is None else None
            case Victim.ENGINE:
                return self._engine(record)
            case Victim.KEEPER:
                return self._keeper(record)
            case _:
                return record.service(victim.value).pid if record else None

    def _postmaster(self) -> int | None:
        try:
            pid = int((self.state.database / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None
        return pid if is_alive(pid) else None

    async def _backend(self) -> int | None:
        """Finds a backend of the store, one that works if there is one."""
        try:
            rows = await self.query(
                "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
                " order by state = 'active' desc, state_change desc limit 1"
            )
        except OSError:
            return None
        return int(rows[0]["pid"]) if rows else None

    def _engine(self, record: StackRecord | None) -> int | None:
        """Finds the process that listens where no service of the record does: the engine of the policy."""
        if record is None:
            return None
        known = {port for each in record.services for port in each.ports.values()} | {self.aggregator_port}
        for each in psutil.net_connections(kind="tcp"):
            if each.status != psutil.CONN_LISTEN or each.pid is None or each.laddr.port in known:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.pid)
                if any("fulmen_algorithm" in word for word in process.cmdline()) and self._is_ours(process):
                    return each.pid
        return None

    def _is_ours(self, process: psutil.Process) -> bool:
        """Returns whether a process belongs to this stack: without namespaces there may be others."""
        return str(self.folder) in " ".join([process.cwd(), *process.cmdline()])

    def _keeper(self, record: StackRecord | None) -> int | None:
        """Finds the guardian of the first runner: it keeps the commands of agents."""
        runner = record.service(Victim.RUNNER.value).pid if record else None
        if runner is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(runner).children():
                if any("guardian_main" in word for word in child.cmdline()):
                    return child.pid
        return None


def short_folder(prefix: str) -> Path:
    """Makes a folder whose path leaves room for a socket's name, and which PostgreSQL's user may enter."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    folder.chmod(0o755)
    return folder


def free_port() -> int:
    """Returns a port on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Returns whether a process has not ended; a zombie has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
