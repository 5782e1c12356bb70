"""Schedules create rollouts at their times, once each, with any number of replicas."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, QuotaExceeded, ScheduleExists, ScheduleNotFound
from fulmen.store.v1 import project_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from fulmen_store.database.database import Database
from fulmen_store.schedules.records import ClaimedRun, RunState
from fulmen_store.schedules.table import ScheduleTable
from tests.support.store.running import StoreHandle, Stubs, cancel, create_project, get, replicas, running_store

LIMIT_S = 20.0
NIGHTLY = "projects/default/schedules/nightly"
STATE = pb.ScheduleRunState
# A minute of each year: nothing is due by itself while a test runs.
RARELY = "0 3 31 12 *"
MAKE_DUE = "update schedule set next_due = date_trunc('second', now()) - $1::interval"


async def create(stubs: Stubs, name: str = NIGHTLY, *, count: int = 2, **fields: Any) -> pb.Schedule:
    """Creates a schedule of so many rollouts, unless others are given."""
    rollouts = [rollout_pb2.Rollout(input=b"{}", task_type=f"t{number}") for number in range(count)]
    schedule = pb.Schedule(**({"name": name, "cron": RARELY, "rollouts": rollouts} | fields))
    created: pb.Schedule = (await stubs.schedules.CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))).schedule
    return created


async def shown(stubs: Stubs, name: str = NIGHTLY) -> pb.GetScheduleResponse:
    """Returns a schedule with its runs."""
    answer: pb.GetScheduleResponse = await stubs.schedules.GetSchedule(pb.GetScheduleRequest(name=name))
    return answer


async def make_due(connection: Any, ago: datetime.timedelta = datetime.timedelta(0)) -> None:
    """Makes all schedules due, some time ago."""
    await connection.execute(MAKE_DUE, ago)


async def until_runs(stubs: Stubs, *states: int, name: str = NIGHTLY) -> list[pb.ScheduleRun]:
    """Waits until the runs of a schedule have these states, newest first."""
    async with asyncio.timeout(LIMIT_S):
        runs = (await shown(stubs, name)).runs
        while [run.state for run in runs] != list(states):
            await asyncio.sleep(0.02)
            runs = (await shown(stubs, name)).runs
        return list(runs)


async def until_counted(connection: Any, table: str, most: int) -> None:
    """Waits until a table has so many rows at most."""
    async with asyncio.timeout(LIMIT_S):
        while await connection.fetchval(f"select count(*) from {table}") > most:  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.02)


async def rollouts_of(stubs: Stubs, project: str = "projects/default") -> list[rollout_pb2.Rollout]:
    """Returns all rollouts of a project."""
    request = rollout_service_pb2.ListRolloutsRequest(project=project, page_size=1000)
    return list((await stubs.rollouts.ListRollouts(request)).rollouts)


async def test_a_due_schedule_creates_its_rollouts(stubs: Stubs, connection: Any) -> None:
    created = await create(stubs, count=2, time_zone="Europe/Berlin", overlap_policy=pb.OVERLAP_POLICY_SKIP)
    assert created.rollout_count == 2
    assert created.next_run_time.ToDatetime().strftime("%m-%d %H:%M") == "12-31 02:00"  # 03:00 in Berlin
    await make_due(connection)
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    made = [await get(stubs, name) for name in run.rollouts]
    due_time = run.due_time.ToDatetime().strftime("%Y-%m-%dT%H:%MZ")
    assert [each.task_type for each in made] == ["t0", "t1"]
    assert [dict(each.metadata) for each in made] == [{"fulmen.schedule": "nightly", "fulmen.due_time": due_time}] * 2
    assert {each.name for each in await rollouts_of(stubs)} == set(run.rollouts)
    answer = await shown(stubs)
    assert answer.schedule.next_run_time == created.next_run_time
    assert len(answer.next_run_times) == 5
    assert len(answer.schedule.rollouts) == 2
    [listed] = (await stubs.schedules.ListSchedules(pb.ListSchedulesRequest())).schedules
    assert listed.last_run == run
    assert not listed.rollouts


async def test_each_due_time_creates_rollouts_once_with_several_replicas(database_url: str, connection: Any) -> None:
    async with replicas(database_url, 3) as handles:
        stubs = await handles[0].stubs()
        names = [f"projects/default/schedules/s{number}" for number in range(20)]
        for name in names:
            await create(stubs, name, count=3)
        for round_number in range(1, 4):
            await make_due(connection, datetime.timedelta(seconds=10 - round_number))
            for name in names:
                await until_runs(stubs, *[STATE.SCHEDULE_RUN_STATE_CREATED] * round_number, name=name)
        made = [rollout for name in names for run in (await shown(stubs, name)).runs for rollout in run.rollouts]
        assert len(set(made)) == 20 * 3 * 3
        assert {each.name for each in await rollouts_of(stubs)} == set(made)


async def test_what_a_replica_that_died_had_begun_with_is_created_once(
    database_url: str, database: Database, connection: Any
) -> None:
    async with running_store(database_url) as handle:
        await create(await handle.stubs(), count=3)
    # It died when it had claimed the due time, and again when it had created the rollouts.
    table = ScheduleTable(database, retry_after_s=0.1)
    await make_due(connection)
    [due] = await table.due(10)
    run = await table.claim(due)
    assert run is not None
    assert await table.claim(due) is None
    async with running_store(database_url) as handle:
        stubs = await handle.stubs()
        [created] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
        assert [name.rpartition("/")[2] for name in created.rollouts] == [str(each) for each in run.rollout_ids]
        await connection.execute("update schedule_run set state = 1, retry_at = now()")
        assert [created] == [_without_claim(each, created) for each in await until_runs(stubs, created.state)]
        assert {each.name for each in await rollouts_of(stubs)} == set(created.rollouts)


def _without_claim(run: pb.ScheduleRun, other: pb.ScheduleRun) -> pb.ScheduleRun:
    run.create_time.CopyFrom(other.create_time)
    return run


async def test_of_the_times_missed_the_latest_is_made_up_for(stubs: Stubs, connection: Any) -> None:
    await create(stubs, cron="*/10 * * * *", count=1)
    await make_due(connection, datetime.timedelta(days=400))
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    age = datetime.datetime.now(datetime.UTC) - run.due_time.ToDatetime(tzinfo=datetime.UTC)
    assert run.due_time.ToDatetime().minute % 10 == 0
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=11)
    assert len(await rollouts_of(stubs)) == 1


async def test_missed_times_are_passed_over_if_the_schedule_says_so(stubs: Stubs, connection: Any) -> None:
    await create(stubs, missed_policy=pb.MISSED_POLICY_SKIP)
    await make_due(connection, datetime.timedelta(hours=2))
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_MISSED)
    assert not run.rollouts
    assert not await rollouts_of(stubs)
    await make_due(connection)
    await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED, STATE.SCHEDULE_RUN_STATE_MISSED)


async def test_a_run_is_skipped_while_rollouts_of_an_earlier_one_are_not_final(stubs: Stubs, connection: Any) -> None:
    created, skipped = STATE.SCHEDULE_RUN_STATE_CREATED, STATE.SCHEDULE_RUN_STATE_SKIPPED
    await create(stubs, overlap_policy=pb.OVERLAP_POLICY_SKIP)
    await make_due(connection, datetime.timedelta(seconds=9))
    [first] = await until_runs(stubs, created)
    await make_due(connection, datetime.timedelta(seconds=8))
    await until_runs(stubs, skipped, created)
    await make_due(connection, datetime.timedelta(seconds=7))
    await until_runs(stubs, skipped, skipped, created)
    await cancel(stubs, *first.rollouts)
    await make_due(connection, datetime.timedelta(seconds=6))
    await until_runs(stubs, created, skipped, skipped, created)
    assert len(await rollouts_of(stubs)) == 4


async def test_groups_of_a_run_are_its_own(stubs: Stubs, connection: Any) -> None:
    members = [rollout_pb2.Rollout(group_id="g", group_size=2, input=b"{}") for _ in range(2)]
    await create(stubs, rollouts=members)
    await make_due(connection, datetime.timedelta(seconds=5))
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    due_time = run.due_time.ToDatetime().strftime("%Y-%m-%dT%H:%MZ")
    assert {each.group_id for each in await rollouts_of(stubs)} == {f"g@{due_time}"}


async def test_rollouts_that_cannot_be_created_are_recorded_as_failed(store: StoreHandle, connection: Any) -> None:
    admin = await store.stubs()
    await create_project(admin, "projects/small", max_queued=1)
    name = "projects/small/schedules/big"
    await create(admin, name, count=2)
    await make_due(connection)
    [run] = await until_runs(admin, STATE.SCHEDULE_RUN_STATE_FAILED, name=name)
    assert run.failure_reason == "QUOTA_EXCEEDED"
    assert run.failure_message
    assert not run.rollouts
    assert not await rollouts_of(admin, "projects/small")


async def test_a_paused_schedule_creates_nothing_and_makes_nothing_up(stubs: Stubs, connection: Any) -> None:
    created = await create(stubs)
    request = pb.PauseScheduleRequest(name=NIGHTLY, reason="holidays")
    paused = (await stubs.schedules.PauseSchedule(request)).schedule
    assert paused.pause_reason == "holidays"
    assert not paused.HasField("next_run_time")
    assert not (await shown(stubs)).next_run_times
    again = (await stubs.schedules.PauseSchedule(pb.PauseScheduleRequest(name=NIGHTLY))).schedule
    assert again.pause_time == paused.pause_time
    resumed = (await stubs.schedules.ResumeSchedule(pb.ResumeScheduleRequest(name=NIGHTLY))).schedule
    assert not resumed.HasField("pause_time")
    assert resumed.next_run_time == created.next_run_time
    assert (await stubs.schedules.ResumeSchedule(pb.ResumeScheduleRequest(name=NIGHTLY))).schedule == resumed
    with pytest.raises(ArgumentInvalid, match="256"):
        await stubs.schedules.PauseSchedule(pb.PauseScheduleRequest(name=NIGHTLY, reason="x" * 257))


async def test_a_deleted_schedule_leaves_its_rollouts(stubs: Stubs, connection: Any) -> None:
    await create(stubs)
    await make_due(connection)
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    await stubs.schedules.DeleteSchedule(pb.DeleteScheduleRequest(name=NIGHTLY))
    assert len(await rollouts_of(stubs)) == len(run.rollouts)
    for call, request in (
        (stubs.schedules.GetSchedule, pb.GetScheduleRequest),
        (stubs.schedules.PauseSchedule, pb.PauseScheduleRequest),
        (stubs.schedules.ResumeSchedule, pb.ResumeScheduleRequest),
        (stubs.schedules.DeleteSchedule, pb.DeleteScheduleRequest),
    ):
        with pytest.raises(ScheduleNotFound) as raised:
            await call(request(name=NIGHTLY))
        assert raised.value.metadata["schedule"] == NIGHTLY


async def test_every_problem_of_a_schedule_is_listed_and_nothing_is_created(stubs: Stubs) -> None:
    bad = rollout_pb2.Rollout(name="x", project="projects/other", priority=1000, group_id="g" * 111)
    bad.not_before_time.FromSeconds(1)
    schedule = pb.Schedule(
        name="projects/default/schedules/Nightly!", cron="61 * * * *", time_zone="Europe/Atlantis",
        overlap_policy=pb.OverlapPolicy.ValueType(7), missed_policy=pb.MissedPolicy.ValueType(7), rollouts=[bad],
    )  # fmt: skip
    with pytest.raises(ArgumentInvalid) as raised:
        await stubs.schedules.CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))
    assert {each.field for each in raised.value.violations} == {
        "schedule.name", "schedule.cron", "schedule.time_zone", "schedule.overlap_policy", "schedule.missed_policy",
        "schedule.rollouts[0].name", "schedule.rollouts[0].not_before_time", "schedule.rollouts[0].group_id",
        "schedule.rollouts[0].project", "schedule.rollouts[0].priority",
    }  # fmt: skip
    with pytest.raises(ArgumentInvalid, match="rollouts: has 0 entries"):
        await create(stubs, count=0)
    with pytest.raises(ArgumentInvalid, match="rollouts: has 101 entries"):
        await create(stubs, count=101)
    large = [rollout_pb2.Rollout(input=b"x" * 250_000) for _ in range(5)]
    with pytest.raises(ArgumentInvalid, match="at most 1048576"):
        await create(stubs, rollouts=large)
    assert not (await stubs.schedules.ListSchedules(pb.ListSchedulesRequest())).schedules


async def test_creating_it_again_returns_it_unless_its_content_differs(stubs: Stubs) -> None:
    assert await create(stubs) == await create(stubs)
    with pytest.raises(ScheduleExists):
        await create(stubs, count=1)


async def test_a_project_has_a_maximum_of_schedules(stubs: Stubs, connection: Any) -> None:
    await create(stubs)
    await connection.execute(
        "insert into schedule (project_id, name, spec, cron, time_zone, overlap_policy, missed_policy, rollout_count)"
        " select project_id, name || n, spec, cron, time_zone, 1, 1, 1 from schedule, generate_series(1, 99) n"
    )
    with pytest.raises(QuotaExceeded):
        await create(stubs, "projects/default/schedules/another")
    assert (await create(stubs)).name == NIGHTLY


async def test_only_the_latest_runs_are_kept_and_the_one_whose_rollouts_may_run(
    stubs: Stubs, connection: Any, database: Database
) -> None:
    await create(stubs, overlap_policy=pb.OVERLAP_POLICY_SKIP, count=1)
    await make_due(connection)
    [first] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    await connection.execute(
        "insert into schedule_run (schedule_id, due_at, state)"
        " select schedule_id, due_at + n * interval '1 ms', 3 from schedule_run, generate_series(1, 150) n"
    )
    await make_due(connection, datetime.timedelta(0))
    await until_counted(connection, "schedule_run", 110)
    rows = await connection.fetch("select due_at, state from schedule_run order by due_at")
    assert rows[0]["due_at"] == first.due_time.ToDatetime(tzinfo=datetime.UTC)
    assert {row["state"] for row in rows[1:]} == {3}
    assert len(await rollouts_of(stubs)) == 1


async def test_a_schedule_of_another_project_is_not_reached(store: StoreHandle) -> None:
    await create_project(await store.stubs(), "projects/other")
    stranger = await store.stubs(role=Role.CLIENT, project="projects/other")
    reader = await store.stubs(role=Role.READER, project="projects/default")
    await create(await store.stubs())
    with pytest.raises(PermissionDenied):
        await shown(stranger)
    assert (await shown(reader)).schedule.name == NIGHTLY
    with pytest.raises(PermissionDenied):
        await reader.schedules.PauseSchedule(pb.PauseScheduleRequest(name=NIGHTLY))


async def test_schedules_go_with_their_project(store: StoreHandle, connection: Any) -> None:
    admin = await store.stubs()
    await create_project(admin, "projects/gone")
    await create(admin, "projects/gone/schedules/s")
    await admin.projects.DeleteProject(project_service_pb2.DeleteProjectRequest(name="projects/gone"))
    await make_due(connection)
    await connection.execute(
        "update project set deleted_at = now() - interval '2 minutes' where deleted_at is not null"
    )
    await until_counted(connection, "schedule", 0)
    assert not await connection.fetchval("select count(*) from rollout")


async def test_a_schedule_that_cannot_be_read_stops_no_other(stubs: Stubs, connection: Any) -> None:
    await create(stubs, "projects/default/schedules/broken")
    await connection.execute("update schedule set spec = '\\xff', time_zone = 'Europe/Atlantis'")
    await create(stubs)
    await make_due(connection)
    await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_FAILED, name="projects/default/schedules/broken")
    assert "cannot be read" in run.failure_message


async def test_a_run_that_another_replica_has_reported_stays_as_it_is(
    stubs: Stubs, connection: Any, database: Database
) -> None:
    await create(stubs)
    await make_due(connection)
    [run] = await until_runs(stubs, STATE.SCHEDULE_RUN_STATE_CREATED)
    schedule_id = await connection.fetchval("select id from schedule")
    claimed = ClaimedRun(
        schedule_id=schedule_id, due_at=run.due_time.ToDatetime(tzinfo=datetime.UTC), state=RunState.STARTING
    )
    assert await ScheduleTable(database).end(claimed, RunState.FAILED, reason="X", message="x") is None
    assert (await shown(stubs)).runs[0] == run
