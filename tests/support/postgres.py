"""A real PostgreSQL for tests: one server per process, a fresh database per test by template.

It is the official image `postgres:17` where a Docker engine answers, otherwise the embedded one; FULMEN_TEST_POSTGRES
(`container` or `embedded`) says which.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_store.database.database import connect
from fulmen_store.database.migrations import migrate
from fulmen_store.retention.retention import Maintenance
from fulmen_store.retention.table import UpkeepTable
from tests.support import docker

__all__ = ["PostgresServer", "postgres_kind", "shared_server"]

LIMIT_S = 60.0
"""Of one statement of administration."""

CONTAINER_IMAGE = "postgres:17"
VARIABLE = "FULMEN_TEST_POSTGRES"
TEMPLATE = "fulmen_template"
# Small and quick. Without fsync a power cut would lose commits; killed processes, as tests have them, lose none.
TEST_SETTINGS = {
    "shared_buffers": "64MB",
    "max_connections": "60",
    "max_wal_size": "128MB",
    "fsync": "off",
    "full_page_writes": "off",
}

_counter = itertools.count(1)


@functools.cache
def postgres_kind() -> str:
    """Returns `container` or `embedded`: as it is set, or by whether a Docker engine answers."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen in ("container", "embedded"):
        return chosen
    if chosen:
        raise ValueError(f"{VARIABLE} is {chosen!r}; it may be container, embedded or not be set.")
    return "embedded" if docker.missing() else "container"


class _Administrator:
    """Makes and drops databases, one after another, in a thread of its own; so it works inside and outside of a loop.

    Its connection stays open: a new one costs both sides as much as a copied database.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres-admin", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Begins work of several statements; returns its outcome."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def execute(self, statement: str) -> None:
        """Runs one statement, in the administrator's thread; once more if tests have ended its connection."""
        async with self._lock:
            if self._connection is not None:
                with contextlib.suppress(asyncpg.InterfaceError, asyncpg.PostgresConnectionError, OSError):
                    await self._connection.execute(statement)
                    return
            self._connection = await asyncpg.connect(self._dsn)
            await self._connection.execute(statement)

    def close(self) -> None:
        """Ends the connection and the thread."""
        if not self._loop.is_closed():
            self.begin(self._disconnect()).result(LIMIT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()

    async def _disconnect(self) -> None:
        async with self._lock:
            if self._connection is not None:
                self._connection.terminate()


class PostgresServer:
    """A running server that makes databases with the store's schema."""

    def __init__(self, *, embedded: bool = False) -> None:
        """Starts it; `embedded` for tests that kill its processes, which a container's cannot be one by one."""
        self.embedded: EmbeddedPostgres | None = None
        self._folder: Path | None = None
        self._container: Any = None
        self._has_template = False
        self._spare: tuple[str, Future[None]] | None = None
        if not embedded and postgres_kind() == "container":
            self._start_container()
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="fulmen-test-pg-"))
            self._folder.chmod(0o755)
            self.embedded = EmbeddedPostgres(self._folder / "data", settings=TEST_SETTINGS)
            self._dsn = self.embedded.start()
        self._administrator = _Administrator(self._dsn)

    def _start_container(self) -> None:
        from testcontainers.community.postgres import PostgresContainer

        settings = [argument for name, value in TEST_SETTINGS.items() for argument in ("-c", f"{name}={value}")]
        self._container = PostgresContainer(CONTAINER_IMAGE, driver=None).with_command(["postgres", *settings])
        self._container.with_env("POSTGRES_INITDB_ARGS", "--no-sync")
        # As the embedded one: to check a password takes longer than most statements.
        self._container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
        # In memory: a database is copied for each test.
        self._container.with_tmpfs_mount("/var/lib/postgresql/data")
        self._container.start()
        self._dsn = self._container.get_connection_url()

    def stop(self) -> None:
        """Stops the server and removes its folder."""
        self._administrator.close()
        if self.embedded is not None:
            self.embedded.stop()
        if self._container is not None:
            self._container.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def fresh_database(self, *, migrated: bool = True) -> str:
        """Makes a database, with the store's schema unless told otherwise, and returns its URL."""
        if not migrated:
            name, made = self._begin_copy("template0")
        else:
            name, made = self._spare or self._begin_copy(TEMPLATE)
            self._spare = None
        made.result(LIMIT_S)
        # The next one is copied while the test that gets this one runs. Others' processes die and clocks leap: they get none.
        if migrated and self.embedded is None:
            self._spare = self._begin_copy(TEMPLATE)
        return self._dsn_of(name)

    def drop(self, dsn: str) -> None:
        """Drops a database, whoever is still connected."""
        name = urlsplit(dsn).path.lstrip("/")
        self._administrator.begin(self._administrator.execute(f'drop database if exists "{name}" with (force)')).result(
            LIMIT_S
        )

    def _dsn_of(self, name: str) -> str:
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{name}"))

    def _begin_copy(self, template: str) -> tuple[str, Future[None]]:
        name = f"test_{os.getpid()}_{next(_counter)}"
        return name, self._administrator.begin(self._copy(name, template))

    async def _copy(self, name: str, template: str) -> None:
        execute = self._administrator.execute
        if template == TEMPLATE and not self._has_template:
            await execute(f'create database "{TEMPLATE}" template template0')
            await migrate(self._dsn_of(TEMPLATE))
            await _create_partitions(self._dsn_of(TEMPLATE))
            self._has_template = True
        await execute(f'create database "{name}" template "{template}" strategy file_copy')


async def _create_partitions(dsn: str) -> None:
    database = await connect(dsn, connections=2, start_limit_s=10)
    await Maintenance(table=UpkeepTable(database)).run_once()
    await database.close()


_server: PostgresServer | None = None


def shared_server() -> PostgresServer:
    """Returns this process's server; it is started at the first call and stopped at the process's end."""
    global _server
    if _server is None:
        _server = PostgresServer()
        atexit.register(_stop_quietly)
    return _server


def _stop_quietly() -> None:
    if _server is not None:
        with contextlib.suppress(OSError):
            _server.stop()
