"""The database of a local stack: whatever ends, stops or shuts it down, it comes back with what it acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from fulmen_cli.local import postgres
from fulmen_cli.local.postgres import EmbeddedPostgres, EmbeddedPostgresError

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 90.0


@pytest.fixture
def server(short_tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    short_tmp_path.chmod(0o755)
    server = EmbeddedPostgres(short_tmp_path / "pg", settings={"shared_buffers": "16MB"})
    server.start()
    yield server
    with contextlib.suppress(EmbeddedPostgresError):
        server.start()
    server.stop()


def pid_of(server: EmbeddedPostgres) -> int:
    return int((server.log_file.parent / "postmaster.pid").read_text().split("\n")[0])


def mended(server: EmbeddedPostgres) -> list[str]:
    """Mends the server as a supervisor does until it accepts connections; returns what it lacked, in order."""
    lacked: list[str] = []
    until = time.monotonic() + LIMIT_S
    while problem := server.mend():
        if lacked[-1:] != [problem]:
            lacked.append(problem)
        assert time.monotonic() < until, lacked
        time.sleep(0.1)
    return lacked


async def rows(server: EmbeddedPostgres, statement: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(server.dsn)
    try:
        return await connection.fetch(statement)
    finally:
        await connection.close()


def test_a_server_that_is_killed_again_while_it_recovers_comes_back_with_what_it_acknowledged(
    server: EmbeddedPostgres,
) -> None:
    asyncio.run(rows(server, "create table kept as select generate_series(1, 200000) as number"))
    for _ in range(3):
        os.kill(pid_of(server), signal.SIGKILL)
        server.mend()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(pid_of(server), signal.SIGKILL)
    mended(server)
    (row,) = asyncio.run(rows(server, "select count(*) as count from kept"))
    assert row["count"] == 200_000


def test_a_server_that_is_told_to_shut_down_does_not_wait_for_open_connections(server: EmbeddedPostgres) -> None:
    async def end_beside_a_connection() -> list[str]:
        connection = await asyncpg.connect(server.dsn)
        first = pid_of(server)
        os.kill(first, signal.SIGTERM)
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            while not await asyncio.to_thread(server.mend):  # noqa: ASYNC110  # state of another process
                await asyncio.sleep(0.05)
        found = await asyncio.to_thread(mended, server)
        assert pid_of(server) != first
        connection.terminate()
        return found

    asyncio.run(end_beside_a_connection())


def test_a_server_that_is_stopped_is_replaced_with_all_its_processes(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PROBE_LIMIT_S", 1)
    first = pid_of(server)
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    for pid in (first, *map(int, children)):
        os.kill(pid, signal.SIGSTOP)
    assert "hung and was killed" in mended(server)
    assert pid_of(server) != first


def test_probes_write_no_errors_into_the_log(server: EmbeddedPostgres) -> None:
    started = len(server.log_file.read_text())
    for _ in range(5):
        assert not server.mend()
    assert "FATAL" not in server.log_file.read_text()[started:]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mount_point_in_place_of_the_folder_is_one_clear_error(short_tmp_path: Path) -> None:
    folder = short_tmp_path / "pg"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=False, capture_output=True)
    if mount.returncode != 0:
        pytest.skip("this kernel lets nobody mount")
    try:
        with pytest.raises(EmbeddedPostgresError, match="not a mount point") as refused:
            EmbeddedPostgres(folder).start()
        assert "\n" not in str(refused.value)
        assert [each.name for each in short_tmp_path.iterdir()] == ["pg"]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_with_something_else_in_it_is_one_clear_error(short_tmp_path: Path) -> None:
    (short_tmp_path / "pg").mkdir()
    (short_tmp_path / "pg" / "notes").touch()
    with pytest.raises(EmbeddedPostgresError, match="It must not exist, or be empty"):
        EmbeddedPostgres(short_tmp_path / "pg").start()
