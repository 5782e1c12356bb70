"""Two PostgreSQL servers, of which the second is a synchronous standby of the first."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from fulmen_cli.local.postgres import SUPERUSER, UNPRIVILEGED_USER, EmbeddedPostgres, find_binaries
from fulmen_store.database.migrations import migrate
from tests.support.postgres import TEST_SETTINGS

DATABASE = "fulmen"
LIMIT_S = 60.0


class Pair:
    """A primary and its standby; commits wait for both."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self._folder = folder
        self.primary = EmbeddedPostgres(folder / "first", settings=TEST_SETTINGS)
        self.standby = EmbeddedPostgres(folder / "second", settings=TEST_SETTINGS)

    @property
    def dsn(self) -> str:
        """URL of the database at whichever of the two is writable."""
        hosts = ",".join(f"{self._folder}/{name}/socket" for name in ("first", "second"))
        return f"postgresql://{SUPERUSER}@/{DATABASE}?host={hosts}&target_session_attrs=read-write"

    def dsn_of(self, server: EmbeddedPostgres) -> str:
        """Returns the URL of the database at one of the two."""
        return server.dsn_of(DATABASE)

    async def go_on_alone(self) -> None:
        """Lets commits of the primary do without the standby."""
        await run(self.primary.dsn, "alter system reset synchronous_standby_names")
        await run(self.primary.dsn, "select pg_reload_conf()")

    async def start(self) -> None:
        """Starts both; returns once commits wait for the standby."""
        await asyncio.to_thread(self.primary.start)
        await run(self.primary.dsn, f"create database {DATABASE} template template0")
        await migrate(self.primary.dsn_of(DATABASE))
        await asyncio.to_thread(self._copy)
        await asyncio.to_thread(self.standby.start)
        await run(self.primary.dsn, "alter system set synchronous_standby_names = '*'")
        await run(self.primary.dsn, "select pg_reload_conf()")
        async with asyncio.timeout(LIMIT_S):
            is_sync = "select 1 from pg_stat_replication where sync_state = 'sync'"
            while not await run(self.primary.dsn, is_sync):  # noqa: ASYNC110  # State of the server.
                await asyncio.sleep(0.05)

    async def fail_over(self) -> None:
        """Kills the primary and promotes the standby."""
        await asyncio.to_thread(self.primary.kill)
        [promoted] = await run(self.standby.dsn, "select pg_promote()")
        assert promoted["pg_promote"], "the standby accepts writes"

    def stop(self) -> None:
        """Stops what runs."""
        self.primary.stop()
        self.standby.stop()

    def _copy(self) -> None:
        target = self._folder / "second"
        command = [f"{find_binaries()}/pg_basebackup", "--checkpoint", "fast", "--no-sync", "--write-recovery-conf"]
        command += [f"--host={self._folder}/first/socket", f"--username={SUPERUSER}", f"--pgdata={target}"]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
        if os.geteuid() == 0:
            owner = pwd.getpwnam(UNPRIVILEGED_USER)
            for path in (target, *target.rglob("*")):
                os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)


@asynccontextmanager
async def running_pair() -> AsyncIterator[Pair]:
    """Yields two servers that run."""
    # Not the folder of a test: paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="fm-pair-"))
    pair = Pair(folder)
    try:
        await pair.start()
        yield pair
    finally:
        await asyncio.to_thread(pair.stop)
        shutil.rmtree(folder, ignore_errors=True)


async def run(dsn: str, statement: str) -> list[asyncpg.Record]:
    """Runs a statement on a connection of its own."""
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetch(statement)
    finally:
        await connection.close()
