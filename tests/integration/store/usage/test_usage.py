"""Usage of model calls counts once, is summed up by group, and limits are told from process to process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.ids import DEFAULT_PROJECT, attempt_name, parse_attempt_name, rollout_name, uuid7
from fulmen.store.v1 import project_service_pb2
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen.store.v1.model_limits_pb2 import CallLimits, ModelLimits
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs, create, create_project, pages_of

DEFAULT = "projects/default"
WEEK_S = 7 * 86_400
LIMITS = ModelLimits(
    project=CallLimits(requests_per_minute=60, tokens_per_minute=10_000, concurrent_calls=4),
    attempt=CallLimits(concurrent_calls=1),
    attempt_token_budget=500,
)


def delta(
    attempt: str = "", *, project: str = DEFAULT, model: str = "tiny", backend: str = "one", **counts: Any
) -> Any:
    usage = pb.Usage(**({"request_count": 1, "prompt_token_count": 10, "completion_token_count": 5} | counts))
    return pb.UsageDelta(project=project, attempt=attempt, model=model, backend=f"backends/{backend}", usage=usage)


def slot_now() -> int:
    return int(time.time() // 3)


async def exchange(
    stubs: Stubs, instance: str = "i", sequence: int = 0, *usage: Any, windows: Any = (), **more: Any
) -> Any:
    request = pb.SyncUsageRequest(
        instance_id=instance,
        sequence=sequence,
        usage=usage,
        windows=windows,
        **({"slot": slot_now()} | more),
    )
    return await stubs.usage.SyncUsage(request)


async def usage(stubs: Stubs, **selection: Any) -> dict[str, pb.Usage]:
    answer = await stubs.usage.GetUsage(pb.GetUsageRequest(**selection))
    return {group.name: group.usage for group in answer.groups}


async def test_usage_is_summed_up_by_whatever_it_is_grouped_by(stubs: Stubs) -> None:
    (mine,) = await create(stubs, training_run="projects/default/trainingRuns/r")
    (other,) = await create(stubs)
    first, second = f"{mine}/attempts/1", f"{mine}/attempts/12"
    await exchange(
        stubs,
        "i",
        1,
        delta(first, cost_micros=100, cached_token_count=4),
        delta(first, cost_micros=1),
        delta(second, model="large", backend="two", failure_count=1),
        delta(f"{other}/attempts/1"),
        delta(model="large"),
    )
    (total,) = (await usage(stubs)).values()
    assert total == pb.Usage(
        request_count=5,
        failure_count=1,
        prompt_token_count=50,
        cached_token_count=4,
        completion_token_count=25,
        cost_micros=101,
    )

    async def requests(**selection: Any) -> dict[str, int]:
        return {name: each.request_count for name, each in (await usage(stubs, **selection)).items()}

    assert await requests(group_by=pb.USAGE_GROUPING_MODEL) == {"large": 2, "tiny": 3}
    assert await requests(group_by=pb.USAGE_GROUPING_BACKEND) == {"backends/one": 4, "backends/two": 1}
    assert await requests(group_by=pb.USAGE_GROUPING_TRAINING_RUN) == {"": 1, "projects/default/trainingRuns/r": 3}
    assert await requests(group_by=pb.USAGE_GROUPING_ROLLOUT) == {mine: 3, other: 1}
    assert await requests(group_by=pb.USAGE_GROUPING_ATTEMPT, rollout=mine) == {first: 2, second: 1}
    assert await requests(training_run="projects/default/trainingRuns/r", group_by=pb.USAGE_GROUPING_MODEL) == {
        "large": 1,
        "tiny": 2,
    }
    assert await requests(training_run="projects/default/trainingRuns/unknown") == {}
    assert await requests(rollout=rollout_name(DEFAULT_PROJECT, uuid7())) == {}


async def test_a_repeated_exchange_counts_once_and_each_process_has_its_own_sequence(stubs: Stubs) -> None:
    for instance, sequence in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 1)):
        await exchange(stubs, instance, sequence, delta())
    assert (await usage(stubs))[""].request_count == 3


async def test_many_processes_at_once_lose_nothing(stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    models = [f"m{number}" for number in range(8)]

    async def tell(instance: int) -> None:
        for sequence in range(1, 6):
            order = models[instance % 8 :] + models[: instance % 8]
            usage = [delta(f"{rollout}/attempts/1", model=model) for model in order]
            await exchange(stubs, f"i{instance}", sequence, *usage)

    await asyncio.gather(*(tell(instance) for instance in range(10)))
    for selection in ({}, {"rollout": rollout}):
        counted = await usage(stubs, group_by=pb.USAGE_GROUPING_MODEL, **selection)
        assert {name: each.request_count for name, each in counted.items()} == dict.fromkeys(models, 50)


async def test_the_time_selects_minutes_or_rollouts(stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    await exchange(stubs, "i", 1, delta(f"{rollout}/attempts/1"))
    now = int(time.time())
    for group_by in (pb.USAGE_GROUPING_MODEL, pb.USAGE_GROUPING_ROLLOUT):
        assert await usage(stubs, start_time={"seconds": now - 600}, end_time={"seconds": now + 600}, group_by=group_by)
        assert not await usage(stubs, start_time={"seconds": now + 600}, group_by=group_by)
        assert not await usage(stubs, end_time={"seconds": now - 600}, group_by=group_by)
        assert await usage(stubs, start_time={"seconds": -62_000_000_000}, group_by=group_by)
    with pytest.raises(ArgumentInvalid):
        await usage(stubs, end_time={"seconds": 2**60})


async def test_groups_come_in_pages(stubs: Stubs) -> None:
    models = sorted(["a", "B", "é" * 128, "z", "a/b"])
    await exchange(stubs, "i", 1, *(delta(model=model) for model in models))
    request = pb.GetUsageRequest(group_by=pb.USAGE_GROUPING_MODEL, page_size=2)
    pages = await pages_of(stubs.usage.GetUsage, request)
    assert [group.name for page in pages for group in page.groups] == models


async def test_limits_of_projects_are_told_to_every_process(stubs: Stubs) -> None:
    assert not (await exchange(stubs)).limits
    created = await create_project(stubs, "projects/a", model_limits=LIMITS)
    assert created.model_limits == LIMITS
    answer = await exchange(stubs)
    assert [(each.project, each.limits) for each in answer.limits] == [("projects/a", LIMITS)]
    assert abs(answer.store_time.ToSeconds() - time.time()) < 60
    created.ClearField("model_limits")
    await stubs.projects.UpdateProject(project_service_pb2.UpdateProjectRequest(project=created))
    assert not (await exchange(stubs)).limits


async def test_limits_out_of_range_are_told_by_their_path(stubs: Stubs) -> None:
    limits = ModelLimits(
        project=CallLimits(requests_per_minute=-1), attempt=CallLimits(concurrent_calls=10**7), attempt_token_budget=-5
    )
    with pytest.raises(ArgumentInvalid) as refused:
        await create_project(stubs, "projects/a", model_limits=limits)
    assert {violation.field for violation in refused.value.violations} == {
        "project.model_limits.project.requests_per_minute",
        "project.model_limits.attempt.concurrent_calls",
        "project.model_limits.attempt_token_budget",
    }


async def test_what_others_count_is_the_sum_of_what_each_said_last(stubs: Stubs) -> None:
    attempt, elsewhere = (attempt_name(DEFAULT_PROJECT, uuid7(), 1) for _ in range(2))

    def windows(requests: int) -> list[pb.LimitWindow]:
        counts = {"request_counts": [0, requests], "token_counts": [10 * requests, 7], "in_flight_count": 1}
        return [
            pb.LimitWindow(project=DEFAULT, **counts),
            pb.LimitWindow(project=DEFAULT, backend="backends/one", **counts),
            pb.LimitWindow(project=DEFAULT, attempt=elsewhere if requests == 3 else attempt, **counts),
        ]

    now = slot_now()
    await exchange(stubs, "a", windows=windows(1), slot=now)
    await exchange(stubs, "a", windows=windows(2), slot=now)
    await exchange(stubs, "b", windows=windows(3), slot=now - 2)
    await exchange(stubs, "long-ago", windows=windows(100), slot=now - 30)
    answer = await exchange(stubs, "c", windows=[pb.LimitWindow(project=DEFAULT, attempt=attempt)])
    told = {(each.backend, each.attempt): each for each in answer.others}
    assert set(told) == {("", ""), ("backends/one", ""), ("", attempt)}
    everything = told["", ""]
    assert sum(everything.request_counts) == 5
    assert everything.in_flight_count == 3
    # a's are two slots younger than b's.
    (*_, youngest) = (index for index, count in enumerate(everything.request_counts) if count == 2)
    assert everything.request_counts[youngest + 2] == 3
    assert sum(told["", attempt].token_counts) == 27
    assert {(each.backend, each.attempt) for each in (await exchange(stubs, "a")).others} == {
        ("", ""),
        ("backends/one", ""),
    }


async def test_stored_windows_that_cannot_be_read_count_nothing(stubs: Stubs, connection: asyncpg.Connection) -> None:
    window = pb.LimitWindow(project=DEFAULT, request_counts=[7])
    for instance in ("damaged", "a"):
        await exchange(stubs, instance, windows=[window])
    await connection.execute("update usage_window set windows = '\\xff' where instance = 'damaged'")
    (told,) = (await exchange(stubs, "b", windows=[window])).others
    assert sum(told.request_counts) == 7


async def test_an_attempts_tokens_are_those_of_all_processes(stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    attempt = f"{rollout}/attempts/1"
    window = pb.LimitWindow(project=DEFAULT, attempt=attempt)
    assert not (await exchange(stubs, "a", windows=[window])).attempts
    await exchange(stubs, "b", 1, delta(attempt), delta(attempt, model="large"))
    (told,) = (await exchange(stubs, "a", 1, delta(attempt), windows=[window])).attempts
    assert (told.attempt, told.token_count) == (attempt, 45)


async def test_a_process_of_one_project_neither_tells_nor_hears_of_others(store: StoreHandle, stubs: Stubs) -> None:
    for name in ("projects/a", "projects/b"):
        await create_project(stubs, name, model_limits=LIMITS)
    (rollout,) = await create(stubs, project="projects/b")
    attempt = f"{rollout}/attempts/1"
    windows = [pb.LimitWindow(project="projects/b", attempt=name, request_counts=[7]) for name in ("", attempt)]
    await exchange(stubs, "all", 1, delta(attempt, project="projects/b"), windows=windows)
    own = await store.stubs(role=Role.SERVICE, project="projects/a")
    answer = await exchange(
        own, "a", 1, delta(project="projects/b"), delta(project="projects/a"), delta(project="nobody"), windows=windows
    )
    assert answer.rejected_count == 2
    assert [each.project for each in answer.limits] == ["projects/a"]
    assert not answer.others
    assert not answer.attempts
    assert (await usage(stubs, project="projects/b"))[""].request_count == 1
    assert (await usage(own))[""].request_count == 1
    assert not (await exchange(stubs, "all")).others
    with pytest.raises(PermissionDenied):
        await usage(own, project="projects/b")


async def test_a_malformed_exchange_counts_nothing_and_tells_every_problem(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        await exchange(stubs, "two words", 0, delta(), delta(model=""), delta(cost_micros=-1), slot=-1)
    assert {violation.field for violation in refused.value.violations} == {
        "instance_id",
        "sequence",
        "slot",
        "usage[1].model",
        "usage[2].usage",
    }
    with pytest.raises(ArgumentInvalid):
        await exchange(stubs, "i", 1, delta("projects/default/rollouts/1"))
    assert not await usage(stubs)


async def test_usage_goes_with_the_retention_of_its_project(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection
) -> None:
    await create_project(stubs, "projects/a", retention={"seconds": WEEK_S})
    (kept,) = await create(stubs, project="projects/a")
    attempt, forever = f"{kept}/attempts/1", "projects/default"
    await exchange(stubs, "i", 1, delta(attempt, project="projects/a"), delta(project="projects/a"), delta())
    old = attempt_name("projects/a", uuid7(int((time.time() - 2 * WEEK_S) * 1000)), 1)
    # As if it were of two weeks ago, its rollout gone with its day.
    await connection.execute(
        "insert into usage_attempt select $1, 1, model, backend, project_id, run_id, request_count, failure_count, "
        "prompt_token_count, cached_token_count, completion_token_count, cost_micros from usage_attempt",
        parse_attempt_name(old).rollout_id,
    )
    await connection.execute("update usage_minute set minute = minute - interval '14 days'")
    by_attempt = {"project": "projects/a", "group_by": pb.USAGE_GROUPING_ATTEMPT}
    assert set(await usage(stubs, **by_attempt)) == {attempt, old}
    await store.parts.roles["usage-retention"].run_once()
    assert set(await usage(stubs, **by_attempt)) == {attempt}
    assert not await usage(stubs, project="projects/a")
    assert await usage(stubs, project=forever)
