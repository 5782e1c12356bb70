"""Lists by filter: SQL selects what the filter means, in windows, with pages that are bound to their filter."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, PageTokenInvalid
from fulmen.store.v1 import failure_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.database.database import connect
from fulmen_store.database.queries import SQL, filtered
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.facet_lists import RolloutFacets
from fulmen_store.rollouts.facets import FACETED_FIELDS
from fulmen_store.rollouts.filter import (
    ROLLOUTS,
    Comparison,
    Expression,
    Field,
    Presence,
    Search,
    both,
)
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.rollouts.filter_sql import compiled, order_sql
from fulmen_store.rollouts.lists import WALKED, RolloutLists
from fulmen_store.rollouts.ordering import SORTED_FIELDS, SortKey
from tests.support.postgres import shared_server
from tests.support.store.filtered_rollouts import FilteredRollouts, insert_rollouts
from tests.support.store.filters import (
    MAPS,
    MOMENTS,
    expressions,
    orders,
    written,
)
from tests.support.store.running import LIMIT_S, Runner, Stubs, cancel, create, get

LISTS = tuple(name for name, statement in SQL.items() if "/* filter */" in statement and "_rollouts" in name)
SOME_VALUE: dict[Field, Any] = (
    dict.fromkeys(Field, 1)
    | {
        Field.NAME: "0192",
        Field.GROUP_ID: "x",
        Field.TASK_TYPE: "x",
        Field.AGENT: "x",
        Field.TRAINING_RUN: "x",
        Field.CREATE_TIME: MOMENTS[0],
        Field.END_TIME: MOMENTS[0],
        Field.REWARD: 0.5,
        Field.DURATION: 0.5,
    }
    | dict.fromkeys(MAPS, "x")
)


@pytest.fixture(scope="module")
def filtered_rollouts() -> Iterator[FilteredRollouts]:
    """Yields 80 random rollouts."""
    server = shared_server()
    dsn = server.fresh_database()
    with asyncio.Runner() as runner:
        database = runner.run(connect(dsn, connections=2, start_limit_s=10))
        facts = runner.run(insert_rollouts(dsn, random.Random(7), 80))
        yield FilteredRollouts(runner, database, facts)
        runner.run(database.close())
    server.drop(dsn)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=expressions())
def test_sql_selects_exactly_what_the_filter_means(filtered_rollouts: FilteredRollouts, where: Expression) -> None:
    pages = filtered_rollouts.all_pages(where)
    assert [one for page in pages for one in page] == filtered_rollouts.selected(where)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=expressions(), limit=st.integers(1, 20))
def test_dead_rollouts_are_listed_through_their_own_index_with_the_same_result(
    filtered_rollouts: FilteredRollouts, where: Expression, limit: int
) -> None:
    dead = both(parse_filter("state = FAILED"), where)
    assert dead is not None
    pages = filtered_rollouts.all_pages(dead, limit=limit)
    assert [one for page in pages for one in page] == filtered_rollouts.selected(dead)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.none() | expressions(), order=orders(), limit=st.integers(1, 30))
def test_pages_in_an_order_hold_every_selected_rollout_once_and_in_its_place(
    filtered_rollouts: FilteredRollouts, where: Expression | None, order: tuple[SortKey, ...], limit: int
) -> None:
    pages = filtered_rollouts.sorted_pages(where, order, limit=limit)
    assert [one for page in pages for one in page] == filtered_rollouts.in_order(where, order)
    assert all(len(page) == limit for page in pages[:-1])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.none() | expressions(),
    key=st.builds(SortKey, field=st.sampled_from(list(WALKED)), descending=st.booleans()),
    bound=st.none() | st.sampled_from(["reward >= 0.1", "reward <= 0.1", "duration = 1.5s", "cost_micros > 7"]),
    limit=st.integers(1, 30),
    walked_at=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_pages_along_an_index_are_those_of_a_sorted_list(
    filtered_rollouts: FilteredRollouts, where: Expression | None, key: SortKey, bound: str | None, limit: int,
    walked_at: list[bool],
) -> None:  # fmt: skip
    where = both(parse_filter(bound or ""), where)
    pages = filtered_rollouts.sorted_pages(where, [key], limit=limit, walked_at=walked_at)
    assert [one for page in pages for one in page] == filtered_rollouts.in_order(where, [key])
    assert all(len(page) <= limit for page in pages)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.none() | expressions())
def test_the_filter_of_a_facet_selects_what_it_counts(
    filtered_rollouts: FilteredRollouts, where: Expression | None
) -> None:
    own = filtered_rollouts
    facets = own.runner.run(own.facets.facets(1, None, where=where, fields=FACETED_FIELDS))
    assert [facet.field for facet in facets] == list(FACETED_FIELDS)
    selected = own.in_order(where, [])
    for facet in facets:
        assert (facet.examined, facet.has_more) == (len(selected), False)
        for value in facet.values:
            chosen = both(where, parse_filter(value.filter))
            assert value.count == len(own.in_order(chosen, [])), value
        if facet.field not in MAPS:
            assert sum(value.count for value in facet.values) == len(selected)


def test_a_facet_that_reaches_its_bound_says_so(filtered_rollouts: FilteredRollouts) -> None:
    count = len(filtered_rollouts.facts)
    for most in (5, 20, count, count + 1):
        facets = RolloutFacets(filtered_rollouts.database, window_rows=7, max_examined=most, max_maps_examined=most)
        for fields in ((Field.STATE,), (Field.METADATA,)):
            (facet,) = filtered_rollouts.runner.run(facets.facets(1, None, where=None, fields=fields))
            assert (facet.examined, facet.has_more) == (min(most, count), most <= count)


def test_a_list_that_is_too_long_to_be_sorted_is_refused(filtered_rollouts: FilteredRollouts) -> None:
    database, max_sorted = filtered_rollouts.database, len(filtered_rollouts.facts) - 1
    lists = RolloutLists(database, ProjectNames(database), max_sorted=max_sorted)
    order = [SortKey(field=Field.PRIORITY)]
    with pytest.raises(ArgumentInvalid, match="too long"):
        filtered_rollouts.runner.run(lists.sorted_page(1, None, where=None, order=order, after=None, limit=5))
    failed = parse_filter("state = FAILED")
    page = filtered_rollouts.runner.run(lists.sorted_page(1, None, where=failed, order=order, after=None, limit=5))
    assert [view.rollout_id for view in page.views] == filtered_rollouts.in_order(failed, order)[:5]


def test_a_page_whose_time_is_up_is_short_and_the_next_goes_on(filtered_rollouts: FilteredRollouts) -> None:
    where = parse_filter("priority = 3 AND mode = TEST AND state = SUCCEEDED OR group_id = a AND priority = 3")
    assert where is not None
    pages = filtered_rollouts.all_pages(where, limit_s=0.0)
    assert len(pages) >= len(filtered_rollouts.facts) // 7
    assert any(len(page) < 5 for page in pages[:-1])
    assert [one for page in pages for one in page] == filtered_rollouts.selected(where)


async def test_every_field_and_operator_can_be_prepared(connection: Any) -> None:
    for name in LISTS:
        first = 1 + max(int(number) for number in re.findall(r"\$(\d+)", SQL[name]))
        for field in Field:
            for operator in ROLLOUTS.operators_of(field):
                key = "x" if field in ROLLOUTS.maps else ""
                where: Expression = Comparison(field=field, key=key, operator=operator, value=SOME_VALUE[field])
                condition, values = compiled(where, first=first)
                statement = await connection.prepare(filtered(name, condition))
                assert len(statement.get_parameters()) == first - 1 + len(values)
            asked: list[Expression] = [Presence(field=field, key="x" if field in ROLLOUTS.maps else "")]
            if field in ROLLOUTS.texts:
                asked.append(Search(field=field, text="x"))
            for where in asked:
                condition, values = compiled(where, first=first)
                statement = await connection.prepare(filtered(name, condition))
                assert len(statement.get_parameters()) == first - 1 + len(values)


async def test_every_list_can_be_prepared_in_every_order(connection: Any) -> None:
    for name in (name for name in LISTS if "/* order */" in SQL[name]):
        for field in SORTED_FIELDS:
            order = order_sql([SortKey(field=field, descending=True)])
            await connection.prepare(filtered(name, "true", order))


async def test_lists_walk_an_index_and_look_at_one_window(connection: Any) -> None:
    await connection.execute(
        "insert into rollout (id, project_id, run_id, sort_priority, mode, request)"
        " select gen_random_uuid(), 1 + n % 2, n % 3, 0, 1, '' from generate_series(1, 20000) n"
    )
    await connection.execute(
        "insert into rollout_end (rollout_id, project_id, run_id, group_size, state, failure_kind)"
        " select id, project_id, run_id, 1, case when sort_priority = 0 and get_byte(uuid_send(id), 15) = 0 then 5 else 4 end,"
        " case when sort_priority = 0 and get_byte(uuid_send(id), 15) = 0 then 1 else 0 end from rollout"
    )
    ids = "'ffffffff-ffff-ffff-ffff-ffffffffffff', '00000000-0000-0000-0000-000000000000'"
    cases = {
        "project_window": (f"1, {ids}, 4999", "rollout_by_project"),
        "run_window": (f"1, {ids}, 999, 1", "rollout_by_run"),
        "dead_window": (f"1, {ids}, 10", "rollout_end_dead"),
        "list_project_rollouts": (f"1, {ids}, 51", "rollout_by_project"),
        "list_run_rollouts": (f"1, {ids}, 51, 1", "rollout_by_run"),
        "list_dead_rollouts": (f"1, {ids}, 51, null", "rollout_end_dead"),
    }
    for name, (arguments, index) in cases.items():
        await connection.execute(f"prepare {name} as {SQL[name]}")
        rows = await connection.fetch(f"explain (analyze, costs off, timing off) execute {name} ({arguments})")
        plan = "\n".join(row[0] for row in rows)
        assert index in plan, plan
        assert "->  Sort" not in plan, plan
        assert "Seq Scan on rollout" not in plan, plan


async def test_orders_of_figures_walk_their_indices(connection: Any) -> None:
    await connection.execute(
        "insert into rollout_end (rollout_id, project_id, group_size, state, failure_kind, reward, duration_s)"
        " select gen_random_uuid(), 1 + n % 2, 1, 4, 0, n % 3, n % 5 from generate_series(1, 20000) n"
    )
    await connection.execute(
        "insert into rollout_usage (rollout_id, project_id, prompt_token_count, completion_token_count, cost_micros)"
        " select rollout_id, project_id, duration_s, 1, duration_s from rollout_end"
    )
    for field, index in (
        (Field.REWARD, "rollout_end_by_reward"), (Field.DURATION, "rollout_end_by_duration"),
        (Field.TOKEN_COUNT, "rollout_usage_by_tokens"), (Field.COST_MICROS, "rollout_usage_by_cost"),
    ):  # fmt: skip
        for direction, start in (("descending", WALKED[field]), ("ascending", -WALKED[field])):
            name = f"{field}_{direction}"
            await connection.execute(f"prepare {name} as {SQL[name]}")
            explain = f"explain (analyze, costs off, timing off) execute {name} (1, '{start}', '{UUID(int=2**128 - 1)}', 50, null)"
            plan = "\n".join(row[0] for row in await connection.fetch(explain))
            assert index in plan, plan
            assert "Sort" not in plan, plan
            assert "Seq Scan" not in plan, plan
            assert not re.search(r"rows=(?:[1-9]\d{2,})", plan), plan


async def test_a_list_by_filter_fills_in_the_count_of_ended_attempts(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(max_attempts=2, retry_backoff={"nanos": 1_000_000})
    (twice,) = await create(stubs, policy=policy, task_type="long")
    runner = await Runner(stubs).open()
    for _ in range(2):
        await runner.complete(await runner.take(1), failure_kind=failure_pb2.FAILURE_KIND_INFRA)
    (once,) = await create(stubs, agent="resources/agent.x/versions/3")
    await runner.complete(await runner.take(1))
    assert await _listed(stubs, "ended_attempt_count >= 1") == [(once, 1), (twice, 2)]
    assert await _listed(stubs, "ended_attempt_count = 2 AND state = FAILED") == [(twice, 2)]
    assert await _listed(stubs, "task_type = long") == [(twice, 2)]
    assert await _listed(stubs, 'task_type = "agent.x" AND agent = resources/agent.x/versions/3') == [(once, 1)]
    assert (await get(stubs, twice)).ended_attempt_count == 2


async def test_a_filter_reads_the_values_of_maps_of_rollouts_as_they_are_created(stubs: Stubs) -> None:
    fields = {"metadata": {"customer": "acme", "a b": ""}, "input": bytes(range(256)) * 900, "priority": 3}
    versions = {"tool": "resources/tool/versions/2"}
    (one,) = await create(stubs, required_labels={"gpu": "h200"}, resource_versions=versions, **fields)
    (other,) = await create(stubs, metadata={"customer": "acme corp"})
    for text, names in (
        ("metadata.customer = acme", [one]),
        ('metadata."a b" = "" AND metadata.customer != x', [one]),
        ('metadata.customer = "acme corp"', [other]),
        ("required_labels.gpu = h200", [one]),
        ("resource_versions.tool = resources/tool/versions/2", [one]),
        ("metadata.gpu = h200 OR required_labels.customer = acme", []),
        ("NOT metadata.customer = acme", [other]),
        ('metadata.nothing = ""', []),
        ("metadata.nothing != x", [other, one]),
    ):
        assert [name for name, _ in await _listed(stubs, text)] == names, text


async def test_a_map_of_a_message_that_is_malformed_or_of_another_kind_is_empty(connection: Any) -> None:
    whole = rollout_pb2.Rollout(metadata={"a": "b"}, cost_micros=2**62, reward=0.5).SerializeToString()
    read = "select v from message_fields($1, 15) e, message_fields(e, 1) k, message_fields(e, 2) v where k = 'a'"
    assert await connection.fetchval(read, whole) == b"b"
    for size in range(len(whole)):
        assert await connection.fetchval(read, whole[:size]) in (None, b"b")
    for broken in (
        b"\xff" * 40,
        b"\x7a" + b"\xff" * 9 + b"\x01",
        b"\x7b\x01\x7c",
        b"\x7a\x80",
        whole.replace(b"z", b"\xfa"),
    ):
        assert await connection.fetchval(read, broken) is None


async def test_a_list_shows_how_tasks_begin(stubs: Stubs) -> None:
    for task, start in ((b'{"q":\n  "a"}', '{"q": "a"}'), (b"x" * 900, "x" * 200), (b"\xff\x00", ""), (b"", "")):
        (name,) = await create(stubs, input=task, input_start="mine")
        page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter=f'name = "{name}"'))
        assert [(each.input_start, each.input) for each in page.rollouts] == [(start, b"")]
        assert (await get(stubs, name)).input_start == ""
    (name,) = await create(stubs, input="é".encode() * 500)
    page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter=f'name = "{name}"'))
    assert page.rollouts[0].input_start == "é" * 200


async def test_states_and_filter_are_both_honoured(stubs: Stubs) -> None:
    (high,) = await create(stubs, priority=5)
    await create(stubs)
    (cancelled,) = await create(stubs, priority=5)
    await cancel(stubs, cancelled)
    page = await stubs.rollouts.ListRollouts(
        pb.ListRolloutsRequest(states=[rollout_pb2.ROLLOUT_STATE_QUEUED], filter="priority > 0")
    )
    assert [rollout.name for rollout in page.rollouts] == [high]


async def test_a_page_token_is_bound_to_its_filter(stubs: Stubs) -> None:
    names = await create(stubs, 5, priority=1)
    first = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter="priority = 1", page_size=2))
    assert [rollout.name for rollout in first.rollouts] == sorted(names, reverse=True)[:2]
    for other in ("priority = 2", ""):
        with pytest.raises(PageTokenInvalid):
            await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter=other, page_token=first.next_page_token))
    rest = await stubs.rollouts.ListRollouts(
        pb.ListRolloutsRequest(filter="priority = 1", page_token=first.next_page_token)
    )
    assert [rollout.name for rollout in rest.rollouts] == sorted(names, reverse=True)[2:]
    assert not rest.next_page_token


async def test_a_filter_is_data_and_never_sql(stubs: Stubs) -> None:
    (name,) = await create(stubs, group_id="x'; drop table rollout; --", group_size=1)
    page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter='group_id = "x\'; drop table rollout; --"'))
    assert [rollout.name for rollout in page.rollouts] == [name]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | expressions().map(written))
def test_no_filter_breaks_the_store(fuzzed: tuple[asyncio.AbstractEventLoop, Stubs], text: str) -> None:
    loop, stubs = fuzzed

    async def send() -> None:
        async with asyncio.timeout(LIMIT_S):
            try:
                await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter=text))
                await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(filter=text or "*"))
            except ArgumentInvalid as error:
                assert {violation.field for violation in error.violations} == {"filter"}  # noqa: PT017  # not expected

    loop.run_until_complete(send())


async def _listed(stubs: Stubs, text: str) -> list[tuple[str, int]]:
    page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter=text))
    return [(rollout.name, rollout.ended_attempt_count) for rollout in page.rollouts]
