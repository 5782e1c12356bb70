"""The history of training runs: recorded once, under the newest epoch, and read as curves that lose no peak."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, RunLeaseLost
from fulmen.store.v1 import run_history_service_pb2 as pb
from fulmen.store.v1 import run_lease_service_pb2 as leases_pb
from fulmen.type.v1 import reward_distribution_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs

RUN = "projects/default/trainingRuns/one"
OTHER = "projects/default/trainingRuns/two"
BEGIN = datetime(2026, 3, 14, 10, tzinfo=UTC)


async def owned(stubs: Stubs, run: str = RUN, owner: str = "a") -> int:
    """Records a run if it is new and acquires it; returns the epoch."""
    if not (await stubs.run_leases.ListRunLeases(leases_pb.ListRunLeasesRequest(project="projects/default"))).leases:
        await stubs.run_leases.CreateRunLease(leases_pb.CreateRunLeaseRequest(training_run=run))
    request = leases_pb.AcquireRunLeaseRequest(training_run=run, owner=owner, owner_address="a:1")
    request.ttl.FromTimedelta(timedelta(seconds=60))
    return (await stubs.run_leases.AcquireRunLease(request)).lease.epoch


def event(sequence: int, **fields: Any) -> pb.RunHistoryEvent:
    message = pb.RunHistoryEvent(sequence=sequence, **fields)
    message.event_time.FromDatetime(BEGIN + timedelta(seconds=sequence))
    return message


def step(sequence: int, number: int, **values: float) -> pb.RunHistoryEvent:
    return event(sequence, step=pb.RunHistoryStep(step=number, values=values))


def notice(sequence: int, text: str, severity: str = "warning") -> pb.RunHistoryEvent:
    return event(sequence, notice=pb.RunHistoryNotice(severity=severity, message=text))


async def append(stubs: Stubs, epoch: int, *events: pb.RunHistoryEvent, run: str = RUN) -> int:
    fence = leases_pb.RunFence(training_run=run, epoch=epoch)
    request = pb.AppendRunHistoryRequest(run_fence=fence, events=events)
    return (await stubs.run_history.AppendRunHistory(request)).last_sequence


async def curves(
    stubs: Stubs, *metrics: str, axis: pb.RunAxis = pb.RUN_AXIS_STEP, max_points: int = 0
) -> Mapping[str, Sequence[tuple[float, float]]]:
    request = pb.GetRunMetricsRequest(training_runs=[RUN], metrics=metrics, axis=axis, max_points=max_points)
    (found,) = (await stubs.run_history.GetRunMetrics(request)).runs
    return {each.metric: list(zip(each.positions, each.values, strict=True)) for each in found.curves}


async def test_events_are_recorded_once_and_read_by_step_time_and_tokens(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    events = [step(2, 0, accuracy=0.1), step(3, 1, loss=3.0, tokens=10), step(5, 2, loss=2.0, tokens=20)]
    assert await append(stubs, epoch, *events) == 5
    assert await append(stubs, epoch, *events, step(6, 3, loss=1.0, tokens=30)) == 6
    assert await append(stubs, epoch) == 6
    assert await curves(stubs, "loss", "accuracy", "none") == {
        "loss": [(1, 3.0), (2, 2.0), (3, 1.0)],
        "accuracy": [(0, 0.1)],
    }
    assert (await curves(stubs, "loss", axis=pb.RUN_AXIS_TIME))["loss"] == [(1, 3.0), (3, 2.0), (4, 1.0)]
    assert (await curves(stubs, "loss", axis=pb.RUN_AXIS_TOKENS))["loss"] == [(10, 3.0), (30, 2.0), (60, 1.0)]


async def test_a_repeated_step_counts_once_and_what_a_rollback_undid_does_not(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    await append(stubs, epoch, step(1, 1, loss=3), step(2, 2, loss=2), step(3, 3, loss=9), step(4, 2, loss=2.5, kl=1))
    assert (await curves(stubs, "loss"))["loss"] == [(1, 3), (2, 2.5), (3, 9)]
    await append(stubs, epoch, event(5, rolled_back_to_step=1), step(6, 2, loss=1.5))
    assert await curves(stubs, "loss", "kl") == {"loss": [(1, 3), (2, 1.5)]}


async def test_a_long_curve_is_cut_into_pieces_of_which_no_peak_is_lost(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    values = [math.sin(n / 40) for n in range(1200)]
    values[777], values[402] = 50.0, -40.0
    for begin in range(0, len(values), 400):
        part = enumerate(values[begin : begin + 400], begin)
        await append(stubs, epoch, *(step(n + 1, n, loss=value) for n, value in part))
    points = (await curves(stubs, "loss", max_points=100))["loss"]
    assert 50 < len(points) <= 100
    assert {(777.0, 50.0), (402.0, -40.0)} <= set(points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert len((await curves(stubs, "loss", max_points=2000))["loss"]) == 1200
    # The last measurement, which is neither the least nor the greatest, is what a table shows.
    assert points[-1] == (1199.0, values[-1])
    assert (await curves(stubs, "loss", max_points=3))["loss"] == [(402.0, -40.0), (777.0, 50.0), (1199.0, values[-1])]
    assert (await curves(stubs, "loss", max_points=2))["loss"] == [(402.0, -40.0), (777.0, 50.0)]


async def test_numbers_that_are_not_finite_are_counted_and_left_out(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    await append(stubs, epoch, step(1, 1, loss=math.nan), step(2, 2, loss=math.inf), step(3, 3, loss=1.0))
    request = pb.GetRunMetricsRequest(training_runs=[RUN, OTHER], metrics=["loss"])
    first, second = (await stubs.run_history.GetRunMetrics(request)).runs
    (curve,) = first.curves
    assert (list(curve.values), curve.measurement_count, curve.not_finite_count) == ([1.0], 1, 2)
    assert (first.last_sequence, list(first.metric_names)) == (3, ["loss"])
    assert first.first_event_time.ToDatetime(tzinfo=UTC) == BEGIN + timedelta(seconds=1)
    assert (second.training_run, list(second.curves), second.last_sequence) == (OTHER, [], 0)


async def test_only_the_newest_epoch_of_a_recorded_run_appends(stubs: Stubs) -> None:
    with pytest.raises(RunLeaseLost):
        await append(stubs, 1, step(1, 1, loss=1))
    old = await owned(stubs)
    new = await owned(stubs)
    with pytest.raises(RunLeaseLost):
        await append(stubs, old, step(1, 1, loss=1))
    assert await append(stubs, new, step(1, 1, loss=1)) == 1


async def test_rewards_are_read_of_steps_that_are_spread_evenly_with_the_last(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    rewards = [
        reward_distribution_pb2.RewardDistribution(values=[0.0, 1.0], counts=[8 - n % 8, n % 8]) for n in range(40)
    ]
    await append(stubs, epoch, step(1, 0, validation_accuracy=0.5))
    await append(
        stubs,
        epoch,
        *(event(n + 2, step=pb.RunHistoryStep(step=n + 1, rewards=each)) for n, each in enumerate(rewards)),
    )
    request = pb.ListRewardDistributionsRequest(training_run=RUN, max_steps=10)
    found = (await stubs.run_history.ListRewardDistributions(request)).steps
    assert [each.step for each in found] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert found[-1].rewards == rewards[-1]
    request.max_steps = 100
    assert len((await stubs.run_history.ListRewardDistributions(request)).steps) == 40


async def test_notices_are_listed_newest_first_with_the_step_before_them(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    await append(
        stubs, epoch, notice(1, "starts", "info"), step(2, 7, loss=1), notice(3, "a\0b"), notice(4, "c" * 5000)
    )
    first = await stubs.run_history.ListRunNotices(pb.ListRunNoticesRequest(training_run=RUN, page_size=2))
    assert [(each.sequence, each.step, each.severity) for each in first.notices] == [
        (4, 7, "warning"),
        (3, 7, "warning"),
    ]
    assert [len(first.notices[0].message), first.notices[1].message] == [4096, "ab"]
    rest = await stubs.run_history.ListRunNotices(
        pb.ListRunNoticesRequest(training_run=RUN, page_token=first.next_page_token)
    )
    assert [(each.message, each.step, each.severity) for each in rest.notices] == [("starts", 0, "info")]
    assert not rest.next_page_token


async def test_a_malformed_request_is_refused_with_all_of_its_problems(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    with pytest.raises(ArgumentInvalid) as refused:
        await append(stubs, epoch, step(2, 1, **{"x" * 129: 1.0}), notice(2, "text", "loud"), event(3))
    fields = [each.field for each in refused.value.violations]
    assert fields == ["events[0].step.values", "events[1].sequence", "events[1].notice.severity", "events[2]"]
    many = pb.GetRunMetricsRequest(training_runs=[f"{RUN}-{n}" for n in range(51)], metrics=["loss"], max_points=1)
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.run_history.GetRunMetrics(many)
    assert [each.field for each in refused.value.violations] == ["training_runs", "max_points"]
    large = pb.GetRunMetricsRequest(
        training_runs=[f"{RUN}-{n}" for n in range(50)], metrics=[f"m{n}" for n in range(5)], max_points=2000
    )
    with pytest.raises(ArgumentInvalid, match="malformed"):
        await stubs.run_history.GetRunMetrics(large)


async def test_a_reader_sees_the_history_of_its_project_and_appends_none(store: StoreHandle) -> None:
    reader = await store.stubs(role=Role.READER)
    assert await curves(reader, "loss") == {}
    with pytest.raises(PermissionDenied):
        await append(reader, 1, step(1, 1, loss=1))
    stranger = await store.stubs(role=Role.READER, project="projects/other")
    with pytest.raises(PermissionDenied):
        await curves(stranger, "loss")
