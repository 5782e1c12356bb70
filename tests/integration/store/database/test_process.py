"""The store as a process: kill -9 under load loses nothing that was acknowledged; PostgreSQL may restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fulmen.errors import Unavailable
from fulmen.ids import DEFAULT_PROJECT, rollout_name, uuid7
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.process import START_LIMIT_S, StoreProcess
from tests.support.store.running import SIGNING_KEY, Runner, Stubs, queue_stats


async def test_a_killed_store_loses_no_acknowledged_rollout(database_url: str, tmp_path: Path) -> None:
    acknowledged: list[str] = []
    stop = asyncio.Event()
    token = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="tests", ttl_s=600)
    first = StoreProcess(database_url, tmp_path)

    async def load(stubs: Stubs) -> None:
        while not stop.is_set():
            names = [rollout_name(DEFAULT_PROJECT, uuid7()) for _ in range(10)]
            request = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(name=name) for name in names])
            try:
                response = await stubs.rollouts.BatchCreateRollouts(request, timeout=5)
            except Unavailable:
                return
            acknowledged.extend(rollout.name for rollout in response.rollouts)

    async with open_channel(f"127.0.0.1:{await first.port()}", token=token) as channel:
        loads = [asyncio.create_task(load(Stubs(channel))) for _ in range(8)]
        async with asyncio.timeout(START_LIMIT_S):
            while len(acknowledged) < 1000:  # noqa: ASYNC110  # load of eight callers
                await asyncio.sleep(0.01)
        first.kill()
        stop.set()
        await asyncio.gather(*loads)

    second = StoreProcess(database_url, tmp_path)
    async with open_channel(f"127.0.0.1:{await second.port()}", token=token) as channel:
        stubs = Stubs(channel)
        runner = await Runner(stubs).open()
        stats = await queue_stats(stubs)
        assert stats.queued_count >= len(acknowledged)
        taken = {one.rollout.name for one in await runner.take(stats.queued_count)}
        assert len(taken) == stats.queued_count
        assert set(acknowledged) <= taken
        runner.stream.cancel()
    assert second.process.poll() is None
    second.end()
    assert second.process.returncode == 0


async def test_migrate_and_config_are_commands(database_url: str, tmp_path: Path) -> None:
    migrated = StoreProcess(database_url, tmp_path, "migrate")
    assert "up to date" in migrated.process.communicate(timeout=START_LIMIT_S)[0]
    assert migrated.process.returncode == 0
    config = StoreProcess(database_url, tmp_path, "config")
    shown = config.process.communicate(timeout=START_LIMIT_S)[0]
    assert "FULMEN_STORE_LEASE_TTL_S=15.0" in shown
    assert SIGNING_KEY not in shown
    assert database_url not in shown


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"FULMEN_STORE_LEASE_TLL_S": "3"}, "FULMEN_STORE_LEASE_TLL_S: no such setting"),
        ({"FULMEN_STORE_SIGNING_KEY": "short"}, "signing_key must have at least 32 bytes"),
        (
            {"FULMEN_STORE_DATABASE_URL": "postgresql://x@127.0.0.1:1/y", "FULMEN_STORE_DATABASE_START_LIMIT_S": "0"},
            "database cannot be reached",
        ),
    ],
)
def test_a_wrong_setting_is_one_clear_error(tmp_path: Path, settings: dict[str, str], complaint: str) -> None:
    store = StoreProcess("postgresql://unused@127.0.0.1:1/unused", tmp_path, **settings)
    output, _ = store.process.communicate(timeout=START_LIMIT_S)
    assert store.process.returncode != 0
    assert complaint in output
    assert "Traceback" not in output
