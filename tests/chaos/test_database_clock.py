"""A PostgreSQL whose clock is an hour wrong for a while loses, fails and delays nothing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from benchmarks.reliability.faults import FAKETIME, HOUR_S
from fulmen.store.v1 import rollout_pb2
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.postgres import PostgresServer
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, create, running_store

RIGHT_S, WRONG_S = 2.0, 10.0
LIMIT_S = 90.0
DAY_S = 86_400


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the file that says how far the clock of a server is ahead that the test starts."""
    if not FAKETIME.exists():
        pytest.skip("setting a process's clock needs libfaketime")
    file = tmp_path / "clock"
    file.write_text("+0")
    for place in (file, tmp_path, *tmp_path.parents):
        with contextlib.suppress(OSError):  # the server's user reads it
            place.chmod(place.stat().st_mode | 0o055)
    faked = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_CACHE_DURATION": "1"}
    faked["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
    # What faked processes share is made by one that stays, and opened to the server's user.
    program = "import os, sys; print(os.environ['FAKETIME_SHARED'], flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", program], env=faked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    shared = holder.stdout.readline().strip()
    semaphore, memory = (name.removeprefix("/") for name in shared.split())
    for name in (f"sem.{semaphore}", memory):
        Path("/dev/shm", name).chmod(0o666)
    for variable, value in {**faked, "FAKETIME_SHARED": shared}.items():
        monkeypatch.setenv(variable, value)
    yield file
    holder.communicate()


def long_lived() -> str:
    """Returns a token that is valid for longer than the clock is wrong, as `fulmen up` makes them."""
    return TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="tests", ttl_s=DAY_S)


async def create_for(store: StoreHandle, seconds: float) -> int:
    """Creates rollouts faster than they run, each of which is tried once; returns their number."""
    stubs, count = await store.stubs(token=long_lived()), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        count += len(await create(stubs, 6, policy=rollout_pb2.RolloutPolicy(max_attempts=1)))
        await asyncio.sleep(0.1)
    return count


async def run_agents(store: StoreHandle) -> None:
    """Runs attempts, some of which are under way when the clock is set, until cancelled."""
    runner = await Runner(await store.stubs(token=long_lived())).open()
    while True:
        held = await runner.take(1)
        await asyncio.sleep(0.2)
        await runner.complete(held)


@pytest.mark.long
@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
async def test_every_rollout_succeeds_at_its_first_attempt_while_the_clock_is_wrong_and_afterwards(
    ahead_s: int, clock: Path
) -> None:
    server = PostgresServer(embedded=True)
    try:
        dsn = server.fresh_database()
        async with running_store(dsn) as store, asyncio.TaskGroup() as group:
            agents = [group.create_task(run_agents(store)) for _ in range(8)]
            count = await create_for(store, RIGHT_S)
            clock.write_text(f"{ahead_s:+d}")
            count += await create_for(store, WRONG_S)
            clock.write_text("+0")
            count += await create_for(store, RIGHT_S)
            beside = await asyncpg.connect(dsn)
            async with asyncio.timeout(LIMIT_S):
                while await beside.fetchval("select count(*) from item"):  # noqa: ASYNC110  # a table
                    await asyncio.sleep(0.2)
            succeeded = await beside.fetchval("select count(*) from rollout_end where state = 4")
            attempts = await beside.fetchval("select count(*) from attempt")
            failed = await beside.fetch(
                "select e.failure_kind, e.failure_message, a.started_at, a.ended_at from rollout_end e"
                " left join attempt a using (rollout_id) where e.state <> 4"
            )
            await beside.close()
            for agent in agents:
                agent.cancel()
        assert (succeeded, attempts) == (count, count), failed
    finally:
        server.stop()
