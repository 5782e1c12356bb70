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
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
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


class PostgresServer:
    """A running server that makes databases with the store's schema."""

    def __init__(self, *, embedded: bool = False) -> None:
        """Starts it; `embedded` for tests that kill its processes, which a container's cannot be one by one."""
        self.embedded: EmbeddedPostgres | None = None
        self._folder: Path | None = None
        self._container: Any = None
        self._has_template = False
        if not embedded and postgres_kind() == "container":
            self._start_container()
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="fulmen-test-pg-"))
            self._folder.chmod(0o755)
            self.embedded = EmbeddedPostgres(self._folder / "data", settings=TEST_SETTINGS)
            self._dsn = self.embedded.start()

    def _start_container(self) -> None:
        from testcontainers.community.postgres import PostgresContainer

        settings = [argument for name, value in TEST_SETTINGS.items() for argument in ("-c", f"{name}={value}")]
        self._container = PostgresContainer(CONTAINER_IMAGE, driver=None).with_command(["postgres", *settings])
        self._container.with_env("POSTGRES_INITDB_ARGS", "--no-sync")
        # In memory: a database is copied for each test.
        self._container.with_tmpfs_mount("/var/lib/postgresql/data")
        self._container.start()
        self._dsn = self._container.get_connection_url()

    def stop(self) -> None:
        """Stops the server and removes its folder."""
        if self.embedded is not None:
            self.embedded.stop()
        if self._container is not None:
            self._container.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def fresh_database(self, *, migrated: bool = True) -> str:
        """Makes a database, with the store's schema unless told otherwise, and returns its URL."""
        name = f"test_{os.getpid()}_{next(_counter)}"
        run_now(self._create(name, migrated=migrated))
        return self._dsn_of(name)

    def drop(self, dsn: str) -> None:
        """Drops a database, whoever is still connected."""
        name = urlsplit(dsn).path.lstrip("/")
        run_now(self._administrate(f'drop database if exists "{name}" with (force)'))

    def _dsn_of(self, name: str) -> str:
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{name}"))

    async def _create(self, name: str, *, migrated: bool) -> None:
        if not migrated:
            await self._administrate(f'create database "{name}" template template0')
            return
        if not self._has_template:
            await self._administrate(f'create database "{TEMPLATE}" template template0')
            await migrate(self._dsn_of(TEMPLATE))
            await _create_partitions(self._dsn_of(TEMPLATE))
            self._has_template = True
        await self._administrate(f'create database "{name}" template "{TEMPLATE}" strategy file_copy')

    async def _administrate(self, statement: str) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


async def _create_partitions(dsn: str) -> None:
    database = await connect(dsn, connections=2, start_limit_s=10)
    await Maintenance(table=UpkeepTable(database)).run_once()
    await database.close()


def run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end in a thread of its own, so that it works inside and outside of a loop."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="postgres-admin") as executor:
        executor.submit(asyncio.run, coroutine).result()


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
