"""Rollouts are counted by state and failure kind, as lists select them, within a bound."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.messages import enum_word
from fulmen.store.v1 import failure_pb2, reward_pb2
from fulmen.store.v1 import rollout_selection_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2 as list_pb
from fulmen_store.database.database import connect
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from tests.support.store.running import Runner, Stubs, cancel, create

RUN = "projects/default/trainingRuns/a"
Parts = dict[tuple[str, str], int]


async def count(stubs: Stubs, **fields: Any) -> Parts:
    """Counts; returns the parts by words, after it has added them up."""
    answer = await stubs.rollouts.CountRollouts(pb.CountRolloutsRequest(**fields))
    assert answer.count == sum(part.count for part in answer.parts)
    assert not answer.has_more
    return {(enum_word(part, "state"), enum_word(part, "failure_kind")): part.count for part in answer.parts}


async def test_rollouts_are_counted_by_state_and_failure_kind(stubs: Stubs) -> None:
    await create(stubs, 6, training_run=RUN)
    runner = await Runner(stubs).open()
    done, failed, *_ = await runner.take(3)
    await runner.complete([done])
    await runner.complete([failed], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
    await cancel(stubs, *await create(stubs, 2, priority=1))
    of_run = {
        ("queued", ""): 3,
        ("running", ""): 1,
        ("succeeded", ""): 1,
        ("failed", "agent_error"): 1,
    }
    assert await count(stubs) == of_run | {("cancelled", "cancelled"): 2}
    assert await count(stubs, training_run=RUN) == of_run
    assert await count(stubs, filter="priority = 1") == {("cancelled", "cancelled"): 2}
    assert await count(stubs, states=["ROLLOUT_STATE_FAILED"]) == {("failed", "agent_error"): 1}
    assert await count(stubs, filter="state = FAILED AND priority = 1") == {}
    assert await count(stubs, training_run="projects/default/trainingRuns/none") == {}
    with pytest.raises(ArgumentInvalid):
        await count(stubs, filter="state =")


async def test_a_count_that_reaches_its_bound_says_that_there_are_more(database_url: str, connection: Any) -> None:
    await connection.execute(
        "insert into rollout (id, project_id, sort_priority, mode, request)"
        " select gen_random_uuid(), 1, n % 2, 1, '' from generate_series(1, 100) n"
    )
    database = await connect(database_url, connections=2, start_limit_s=10)
    names = ProjectNames(database)
    queued = (RolloutState.QUEUED, FailureKind.NONE)
    try:
        for rows in (7, 50, 100, 101):
            lists = RolloutLists(database, names, window_rows=rows)
            whole = await lists.count(1, None, where=None)
            assert (dict(whole.parts), whole.has_more) == ({queued: 100}, False)
            half = await lists.count(1, None, where=parse_filter("priority = 0"))
            assert dict(half.parts) == {queued: 50}
            first = await lists.count(1, None, where=None, limit_s=0)
            assert (first.parts[queued], first.has_more) == (min(rows, 100), rows <= 100)
    finally:
        await database.close()


async def test_facets_count_the_values_of_fields_and_tell_how_each_is_selected(stubs: Stubs) -> None:
    await create(stubs, 3, training_run=RUN, metadata={"customer": 'a "b"'}, task_type="short")
    await create(stubs, 1, metadata={"customer": "c", "split": "x"})
    runner = await Runner(stubs).open()
    for assignment, reward in zip(await runner.take(3), (0, 0.3, 1), strict=True):
        await runner.complete([assignment], rewards=[reward_pb2.Reward(value=reward)])
    fields = ["state", "training_run", "task_type", "reward", "metadata"]
    answer = await stubs.rollouts.CountRollouts(pb.CountRolloutsRequest(facets=fields))
    assert [facet.field for facet in answer.facets] == fields
    assert {(facet.examined_count, facet.has_more, facet.has_more_values) for facet in answer.facets} == {
        (4, False, False)
    }
    shown = {facet.field: {value.value: value.count for value in facet.values} for facet in answer.facets}
    assert shown == {
        "state": {"SUCCEEDED": 3, "QUEUED": 1},
        "training_run": {RUN: 3, "": 1},
        "task_type": {"short": 3, "": 1},
        "reward": {"": 1, "0": 1, "0.25 to 0.5": 1, "1": 1},
        "metadata": {'customer=a "b"': 3, "customer=c": 1, "split=x": 1},
    }
    for facet in answer.facets:
        for value in facet.values:
            counted = await stubs.rollouts.CountRollouts(pb.CountRolloutsRequest(filter=value.filter))
            assert counted.count == value.count, value.filter


async def test_the_problems_of_a_count_are_told_together(stubs: Stubs) -> None:
    request = pb.CountRolloutsRequest(filter="state =", facets=["state", "input", "state"], time_limit={"seconds": 3})
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.rollouts.CountRollouts(request)
    assert [each.field for each in refused.value.violations] == ["filter", "facets", "facets", "time_limit"]


async def test_a_page_whose_time_is_up_tells_how_far_back_it_looked(stubs: Stubs) -> None:
    first, *_ = await create(stubs, 400, input=b"{}")
    request = list_pb.ListRolloutsRequest(filter="input:nothing", time_limit={"nanos": 1})
    short = await stubs.rollouts.ListRollouts(request)
    assert not short.rollouts
    assert short.next_page_token
    created = (await stubs.rollouts.GetRollout(list_pb.GetRolloutRequest(name=first))).rollout.create_time
    assert abs(short.looked_back_to_time.ToNanoseconds() - created.ToNanoseconds()) < 60e9
    request.page_token = short.next_page_token
    last = await stubs.rollouts.ListRollouts(request)
    assert not last.next_page_token
    assert not last.HasField("looked_back_to_time")
