"""Usage in time: by hours and days, each group its own series, and those behind the last place together."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, ProjectNotFound
from fulmen.ids import parse_rollout_name, uuid7
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.integration.store.usage.test_usage import delta, exchange
from tests.support.store.resources import publish
from tests.support.store.running import StoreHandle, Stubs, create, create_project

HOUR, DAY = datetime.timedelta(hours=1), datetime.timedelta(days=1)
NOON = datetime.datetime(2026, 3, 14, 12, 30, tzinfo=datetime.UTC)
RUN = "projects/default/trainingRuns/r"


async def series(stubs: Stubs, **selection: Any) -> pb.GetUsageSeriesResponse:
    """Returns usage in time."""
    answer: pb.GetUsageSeriesResponse = await stubs.usage.GetUsageSeries(pb.GetUsageSeriesRequest(**selection))
    return answer


def shown(answer: pb.GetUsageSeriesResponse) -> dict[str, list[tuple[datetime.datetime, int]]]:
    """Returns start and calls of each period by group."""
    return {
        each.name: [
            (point.start_time.ToDatetime(tzinfo=datetime.UTC), point.usage.request_count) for point in each.points
        ]
        for each in answer.series
    }


async def at(connection: Any, moment: datetime.datetime) -> None:
    """Moves what was just counted to a time."""
    await connection.execute(
        "update usage_minute set minute = date_trunc('minute', $1::timestamptz) where minute > now() - interval '1 hour'",
        moment,
    )


async def rollout_of(stubs: Stubs, connection: Any, moment: datetime.datetime, **fields: Any) -> str:
    """Creates a rollout of a time."""
    (name,) = await create(stubs, **fields)
    created = uuid7(int(moment.timestamp() * 1000))
    await connection.execute("update rollout set id = $1 where id = $2", created, parse_rollout_name(name).rollout_id)
    return f"projects/default/rollouts/{created}/attempts/1"


async def test_calls_are_counted_in_the_hour_and_the_day_of_their_minute(stubs: Stubs, connection: Any) -> None:
    moments = (NOON, NOON + datetime.timedelta(minutes=29), NOON + HOUR, NOON + DAY)
    for number, moment in enumerate(moments, 1):
        await exchange(stubs, "i", number, delta(cost_micros=10))
        await at(connection, moment)
    noon = NOON.replace(minute=0)
    hours = await series(stubs, start_time=NOON, end_time=NOON + 2 * DAY, period=pb.USAGE_PERIOD_HOUR)
    assert shown(hours) == {"": [(noon, 2), (noon + HOUR, 1), (noon + DAY, 1)]}
    assert (hours.start_time.ToDatetime(tzinfo=datetime.UTC), hours.end_time.ToDatetime(tzinfo=datetime.UTC)) == (
        noon, noon + 2 * DAY + HOUR,
    )  # fmt: skip
    midnight = NOON.replace(hour=0, minute=0)
    days = await series(stubs, start_time=NOON, end_time=NOON + DAY)
    assert shown(days) == {"": [(midnight, 3), (midnight + DAY, 1)]}
    (total,) = (each.total for each in days.series)
    assert (total.request_count, total.prompt_token_count, total.cost_micros) == (4, 40, 40)
    assert not days.HasField("others")
    # The end is exclusive.
    assert shown(await series(stubs, start_time=NOON, end_time=midnight + DAY)) == {"": [(midnight, 3)]}


async def test_without_a_time_the_last_days_and_hours_are_meant(stubs: Stubs) -> None:
    await exchange(stubs, "i", 1, delta())
    for period, count in ((pb.USAGE_PERIOD_HOUR, 48), (pb.USAGE_PERIOD_DAY, 30)):
        answer = await series(stubs, period=period)
        length = HOUR if period == pb.USAGE_PERIOD_HOUR else DAY
        whole = answer.end_time.ToDatetime() - answer.start_time.ToDatetime()
        assert whole == count * length
        assert [calls for _, calls in shown(answer)[""]] == [1]


async def test_groups_come_by_cost_and_those_behind_the_last_place_are_summed_up(stubs: Stubs) -> None:
    usage = [delta(model=f"m{number}", cost_micros=number) for number in range(5)]
    await exchange(stubs, "i", 1, *usage)
    answer = await series(stubs, group_by=pb.USAGE_GROUPING_MODEL, max_series=2)
    assert list(shown(answer)) == ["m4", "m3"]
    assert (answer.others.total.cost_micros, answer.others.total.request_count, answer.other_count) == (3, 3, 3)
    assert len(answer.others.points) == 1
    assert list(shown(await series(stubs, group_by=pb.USAGE_GROUPING_MODEL))) == ["m4", "m3", "m2", "m1", "m0"]
    assert list(shown(await series(stubs, group_by=pb.USAGE_GROUPING_BACKEND))) == ["backends/one"]


async def test_runs_and_agents_count_by_the_time_of_their_rollouts(stubs: Stubs, connection: Any) -> None:
    version = "resources/agent.calc/versions/1"
    await publish(stubs, "agent.calc", kind="agent", content=AgentSpec(command={"argv": ["true"]}).SerializeToString())
    first = await rollout_of(stubs, connection, NOON, training_run=RUN, agent=version)
    second = await rollout_of(stubs, connection, NOON + DAY, training_run=RUN)
    third = await rollout_of(stubs, connection, NOON + DAY)
    await exchange(stubs, "i", 1, delta(first, cost_micros=9), delta(second), delta(third), delta())
    midnight = NOON.replace(hour=0, minute=0)
    when = {"start_time": NOON, "end_time": NOON + 2 * DAY}
    by_run = await series(stubs, group_by=pb.USAGE_GROUPING_TRAINING_RUN, **when)
    assert shown(by_run) == {RUN: [(midnight, 1), (midnight + DAY, 1)], "": [(midnight + DAY, 1)]}
    by_agent = await series(stubs, group_by=pb.USAGE_GROUPING_AGENT, **when)
    assert shown(by_agent) == {version: [(midnight, 1)], "": [(midnight + DAY, 2)]}
    of_run = await series(stubs, training_run=RUN, **when)
    assert shown(of_run) == {"": [(midnight, 1), (midnight + DAY, 1)]}
    assert shown(await series(stubs, training_run="projects/default/trainingRuns/none", **when)) == {}
    totals = await stubs.usage.GetUsage(pb.GetUsageRequest(group_by=pb.USAGE_GROUPING_AGENT))
    assert {group.name: group.usage.request_count for group in totals.groups} == {version: 1, "": 2}


async def test_projects_are_compared_by_whoever_has_access_to_several(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    await exchange(stubs, "i", 1, delta(project="projects/a", cost_micros=5), delta())
    answer = await series(stubs, group_by=pb.USAGE_GROUPING_PROJECT)
    assert list(shown(answer)) == ["projects/a", "projects/default"]
    assert list(shown(await series(stubs, group_by=pb.USAGE_GROUPING_PROJECT, project="projects/a"))) == ["projects/a"]
    of_a = await store.stubs(role=Role.READER, project="projects/a")
    assert list(shown(await series(of_a, group_by=pb.USAGE_GROUPING_PROJECT))) == ["projects/a"]
    with pytest.raises(PermissionDenied):
        await series(of_a, project="projects/default")
    with pytest.raises(ProjectNotFound):
        await series(stubs, project="projects/nobody")


@pytest.mark.parametrize(
    ("field", "selection"),
    [
        ("group_by", {"group_by": pb.USAGE_GROUPING_ROLLOUT}),
        ("group_by", {"group_by": pb.USAGE_GROUPING_PROJECT, "training_run": RUN}),
        ("group_by", {"group_by": 99}),
        ("period", {"period": 9}),
        ("max_series", {"max_series": 51}),
        ("end_time", {"start_time": NOON, "end_time": NOON - DAY}),
        ("start_time", {"start_time": NOON - 40 * DAY, "end_time": NOON, "period": pb.USAGE_PERIOD_HOUR}),
    ],
)
async def test_what_has_no_series_is_refused(stubs: Stubs, field: str, selection: dict[str, Any]) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        await series(stubs, **selection)
    assert [violation.field for violation in refused.value.violations] == [field]


async def test_totals_by_project_are_asked_for_as_series(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid):
        await stubs.usage.GetUsage(pb.GetUsageRequest(group_by=pb.USAGE_GROUPING_PROJECT))
