"""A replica is killed while it creates the rollouts of schedules that are due: each due time creates them once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.process import START_LIMIT_S, StoreProcess
from tests.support.store.running import SIGNING_KEY, Stubs

SCHEDULES = 90
ROLLOUTS = 20
COUNT = "select count(*) from schedule_run where state = any ($1::int[])"
STARTING, CREATED = 1, 2


async def test_a_replica_killed_at_the_due_time_neither_loses_nor_repeats_a_run(
    database_url: str, tmp_path: Path, connection: Any
) -> None:
    token = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="tests", ttl_s=600)
    first, second = (StoreProcess(database_url, tmp_path) for _ in range(2))
    async with open_channel(f"127.0.0.1:{await first.port()}", token=token) as channel:
        stubs = Stubs(channel)
        for number in range(SCHEDULES):
            rollouts = [rollout_pb2.Rollout(input=b"{}") for _ in range(ROLLOUTS)]
            name = f"projects/default/schedules/s{number}"
            schedule = pb.Schedule(name=name, cron="0 3 31 12 *", rollouts=rollouts)
            await stubs.schedules.CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))
    await second.port()
    await connection.execute("update schedule set next_due = now()")
    await until_counted(connection, [STARTING, CREATED], 5)
    first.kill()
    await until_counted(connection, [STARTING, CREATED], SCHEDULES)
    # What the dead one had begun with is due for another one now.
    await connection.execute("update schedule_run set retry_at = now() where state = 1")
    await until_counted(connection, [CREATED], SCHEDULES)
    ids = await connection.fetch("select unnest(rollout_ids) as id from schedule_run")
    assert len(ids) == SCHEDULES * ROLLOUTS
    made = {row["id"] for row in await connection.fetch("select id from rollout")}
    assert made == {row["id"] for row in ids}
    second.end()
    assert second.process.returncode == 0


async def until_counted(connection: Any, states: list[int], least: int) -> None:
    """Waits until so many runs at least are in one of some states."""
    async with asyncio.timeout(START_LIMIT_S):
        while await connection.fetchval(COUNT, states) < least:  # noqa: ASYNC110  # state of other processes
            await asyncio.sleep(0.002)
