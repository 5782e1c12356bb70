"""Responses are stored, read with those before them, and removed; they stay within their project, attempt and room."""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.ids import uuid7
from fulmen.store.v1 import stored_response_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from fulmen_store.calls.responses import StoredResponseTable
from fulmen_store.database.database import Database
from fulmen_store.metrics import StoreMetrics
from fulmen_store.retention.retention import RecordRetention
from tests.support.store.running import StoreHandle, Stubs, create_project, running_store

OTHER = "projects/other"
ATTEMPT = f"projects/default/rollouts/{uuid7()}/attempts/1"
MIB = 1024 * 1024


async def stored(stubs: Stubs, *, after: str = "", size: int = 2, **fields: Any) -> str:
    """Stores a response; returns its id."""
    response = pb.StoredResponse(id=uuid7().hex, previous_id=after, input_json=b"[]", response_json=b"x" * size)
    await stubs.stored_responses.PutStoredResponse(pb.PutStoredResponseRequest(response=response, **fields))
    await asyncio.sleep(0.002)  # ids of one millisecond have no order
    return response.id


async def chain(stubs: Stubs, response_id: str, *, max_count: int = 1000, **fields: Any) -> list[pb.StoredResponse]:
    request = pb.GetStoredResponsesRequest(id=response_id, max_count=max_count, **fields)
    return list((await stubs.stored_responses.GetStoredResponses(request)).responses)


async def deleted(stubs: Stubs, response_id: str, **fields: Any) -> bool:
    request = pb.DeleteStoredResponseRequest(id=response_id, **fields)
    return bool((await stubs.stored_responses.DeleteStoredResponse(request)).deleted)


async def test_a_response_is_read_with_those_before_it_and_knows_their_number_and_bytes(stubs: Stubs) -> None:
    first = await stored(stubs)
    second = await stored(stubs, after=first)
    third = await stored(stubs, after=second)
    found = await chain(stubs, third)
    assert [(each.id, each.previous_id, each.depth) for each in found] == [
        (third, second, 3), (second, first, 2), (first, "", 1),
    ]  # fmt: skip
    assert [each.chain_bytes for each in found] == [3 * 1028, 2 * 1028, 1028]
    assert [each.id for each in await chain(stubs, third, max_count=2)] == [third, second]
    assert [each.id for each in await chain(stubs, third, max_count=0)] == [third]
    assert await chain(stubs, uuid7().hex) == []


async def test_a_page_of_responses_ends_at_its_size_and_goes_on_behind_its_last(stubs: Stubs) -> None:
    ids = [await stored(stubs, size=MIB)]
    for _ in range(3):
        ids.append(await stored(stubs, after=ids[-1], size=MIB))
    pages, at = [], ids[-1]
    while at:
        pages.append(await chain(stubs, at))
        at = pages[-1][-1].previous_id
    assert [each.id for page in pages for each in page] == ids[::-1]
    assert [len(page) for page in pages] == [1, 1, 1, 1]
    largest = await stored(stubs, size=3 * MIB - 2)
    assert [len(each.response_json) for each in await chain(stubs, largest)] == [3 * MIB - 2]


async def test_a_repeated_put_changes_nothing(stubs: Stubs) -> None:
    response = pb.StoredResponse(id=uuid7().hex, response_json=b"first")
    await stubs.stored_responses.PutStoredResponse(pb.PutStoredResponseRequest(response=response))
    response.response_json = b"second"
    await stubs.stored_responses.PutStoredResponse(pb.PutStoredResponseRequest(response=response))
    [found] = await chain(stubs, response.id)
    assert found.response_json == b"first"


async def test_an_attempt_has_its_own_responses_and_an_app_all_of_its_project(stubs: Stubs) -> None:
    other = ATTEMPT.replace("attempts/1", "attempts/2")
    of_attempt, of_app = await stored(stubs, attempt=ATTEMPT), await stored(stubs)
    assert len(await chain(stubs, of_attempt, attempt=ATTEMPT)) == len(await chain(stubs, of_attempt)) == 1
    for asked, by in ((of_attempt, other), (of_app, ATTEMPT)):
        assert await chain(stubs, asked, attempt=by) == []
        assert not await deleted(stubs, asked, attempt=by)
    assert await deleted(stubs, of_attempt, attempt=ATTEMPT)
    assert await deleted(stubs, of_app)
    assert not await deleted(stubs, of_app)
    assert await chain(stubs, of_app) == []


async def test_a_deleted_response_ends_the_chain_of_those_that_continue_it(stubs: Stubs) -> None:
    first = await stored(stubs)
    second = await stored(stubs, after=first)
    assert await deleted(stubs, first)
    [found] = await chain(stubs, second)
    assert (found.id, found.previous_id) == (second, first)


async def test_another_project_finds_and_deletes_nothing(stubs: Stubs, store: StoreHandle) -> None:
    await create_project(stubs, OTHER)
    own = await stored(stubs)
    assert await chain(stubs, own, project=OTHER) == []
    assert not await deleted(stubs, own, project=OTHER)
    # A response of another project is not what one continues.
    theirs = await stored(stubs, after=own, project=OTHER)
    assert [(each.id, each.depth) for each in await chain(stubs, theirs, project=OTHER)] == [(theirs, 1)]
    bound = await store.stubs(role=Role.SERVICE, project=OTHER)
    with pytest.raises(PermissionDenied):
        await chain(bound, own, project="projects/default")
    assert await chain(stubs, own)


async def test_a_response_is_gone_when_its_retention_or_its_key_has_passed(stubs: Stubs, database: Database) -> None:
    kept, over = await stored(stubs), pb.PutStoredResponseRequest(attempt=ATTEMPT)
    over.response.id = uuid7().hex
    over.expire_time.FromNanoseconds(time.time_ns() - 10**9)
    await stubs.stored_responses.PutStoredResponse(over)
    assert await chain(stubs, over.response.id, attempt=ATTEMPT) == []
    assert len(await database.fetch("projects_with_expired_responses")) == 1
    table = StoredResponseTable(database, max_bytes=MIB, retention=datetime.timedelta(days=30), metrics=StoreMetrics())
    await RecordRetention(table=table).run_once()
    assert await database.fetch("projects_with_expired_responses") == []
    assert len(await chain(stubs, kept)) == 1


async def test_a_project_keeps_its_newest_responses_within_its_room(database_url: str) -> None:
    async with running_store(database_url, stored_response_bytes_per_project=MIB) as handle:
        stubs = await handle.stubs()
        ids = [await stored(stubs, size=MIB // 3) for _ in range(6)]
        assert [bool(await chain(stubs, each)) for each in ids] == [False] * 4 + [True] * 2
        await create_project(stubs, OTHER)
        theirs = await stored(stubs, size=MIB // 3, project=OTHER)
        assert await chain(stubs, theirs, project=OTHER)
        assert await chain(stubs, ids[-1])


async def test_a_malformed_request_names_every_problem_and_stores_nothing(stubs: Stubs) -> None:
    request = pb.PutStoredResponseRequest(attempt="projects/other/rollouts/x")
    request.response.id, request.response.previous_id = "resp_1", "y"
    request.response.input_json = b"x" * (3 * MIB + 1)
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.stored_responses.PutStoredResponse(request)
    assert {each.field for each in refused.value.violations} == {
        "attempt", "response.id", "response.previous_id", "response",
    }  # fmt: skip
    with pytest.raises(ArgumentInvalid) as refused:
        await chain(stubs, "nothing", attempt=f"projects/other/rollouts/{uuid7()}/attempts/1", max_count=1001)
    assert {each.field for each in refused.value.violations} == {"id", "attempt", "max_count"}
