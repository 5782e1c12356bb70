"""Recorded calls form conversations, are listed, rated and removed, and stay within their project and its room."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, CallNotFound, PermissionDenied
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from fulmen_store.calls.calls import CALLS, CONVERSATIONS
from fulmen_store.calls.table import CallTable
from fulmen_store.database.database import Database
from fulmen_store.metrics import StoreMetrics
from fulmen_store.retention.retention import RecordRetention
from fulmen_store.rollouts.filter_parser import parse_filter
from tests.support.store.calls import new_call
from tests.support.store.running import StoreHandle, Stubs, create_project, running_store

OTHER = "projects/other"
VALUES = {"text": '"x"', "int": "7", "bigint": "7", "float8": "7", "timestamptz": '"2026-03-14T10:15:00Z"'}


async def record(stubs: Stubs, *calls: pb.NewCall) -> pb.RecordCallsResponse:
    return await stubs.calls.RecordCalls(pb.RecordCallsRequest(calls=calls))


async def calls(stubs: Stubs, **selection: Any) -> list[call_pb2.RecordedCall]:
    request, found = pb.ListCallsRequest(**selection), []
    while True:
        page = await stubs.calls.ListCalls(request)
        found += page.calls
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return found


async def conversations(stubs: Stubs, **selection: Any) -> list[call_pb2.Conversation]:
    request, found = pb.ListConversationsRequest(**selection), []
    while True:
        page = await stubs.calls.ListConversations(request)
        found += page.conversations
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return found


async def test_a_call_that_begins_with_an_earlier_one_and_its_answer_continues_its_conversation(stubs: Stubs) -> None:
    first, other = new_call("Hello", answer="Hi"), new_call("Hello there", answer="Hi")
    await record(stubs, first, other)
    second = new_call("Hello", "Hi", "More", answer="OK")
    # The third was sampled, what came between was not.
    third = new_call("Hello", "Hi", "More", "OK", "Much more", "Sure", "And more", answer="Done")
    await record(stubs, second, third)
    found = {call.name: call.conversation for call in await calls(stubs)}
    assert found[first.call.name] == found[second.call.name] == found[third.call.name]
    assert found[other.call.name] != found[first.call.name]
    counts = {each.name: each.call_count for each in await conversations(stubs)}
    assert counts == {found[first.call.name]: 3, found[other.call.name]: 1}


async def test_the_apps_own_conversation_wins_and_a_repeated_delivery_changes_nothing(stubs: Stubs) -> None:
    first = new_call("Hello", answer="Hi", conversation="chat-1")
    second = new_call("Hello", "Hi", "More", conversation="chat-2")
    for _ in range(2):
        await record(stubs, first, second)
    assert [(each.name, each.call_count) for each in await conversations(stubs)] == [
        ("projects/default/conversations/chat-2", 1),
        ("projects/default/conversations/chat-1", 1),
    ]


async def test_calls_are_listed_by_filter_page_by_page_with_or_without_texts(stubs: Stubs) -> None:
    made = [new_call(f"Question {number}", http_status=200 + number % 2 * 300) for number in range(5)]
    await record(stubs, *made)
    good = await calls(stubs, filter='http_status = 200 AND error = "" AND model = assistant', page_size=2)
    assert [call.name for call in good] == [made[number].call.name for number in (4, 2, 0)]
    assert not any(call.HasField("content") for call in good)
    full = await calls(stubs, with_content=True, page_size=2)
    assert [call.content for call in full] == [call.call.content for call in reversed(made)]
    one = await stubs.calls.GetCall(pb.GetCallRequest(name=made[3].call.name))
    assert (one.call.content, one.call.backend) == (made[3].call.content, "backends/one")


async def test_pages_with_texts_are_cut_by_their_size_and_no_call_is_left_out(stubs: Stubs) -> None:
    made = [new_call("x" * 900_000) for _ in range(4)]
    for call in made:
        await record(stubs, call)
    page = await stubs.calls.ListCalls(pb.ListCallsRequest(with_content=True))
    assert len(page.calls) == 2
    assert [call.name for call in await calls(stubs, with_content=True)] == [call.call.name for call in reversed(made)]


@pytest.mark.parametrize("schema", [CALLS, CONVERSATIONS], ids=["calls", "conversations"])
async def test_every_field_can_be_compared_by_each_of_its_operators(
    database: Database, stubs: Stubs, schema: Any
) -> None:
    listing = calls if schema is CALLS else conversations
    await record(stubs, new_call("Hello"))
    for field, kind in schema.types.items():
        for operator in schema.operators_of(field):
            value = "7s" if field in schema.durations else VALUES[kind]
            text = f"{field} {operator} {value}"
            parse_filter(text, schema)
            assert len(await listing(stubs, filter=text)) in (0, 1), text


async def test_an_app_rates_a_conversation_and_calls_are_found_by_it(stubs: Stubs) -> None:
    good, bad = new_call("Hello", conversation="good"), new_call("Bye", conversation="bad")
    await record(stubs, good, bad)
    names = {key: f"projects/default/conversations/{key}" for key in ("good", "bad")}
    await stubs.calls.RateConversation(pb.RateConversationRequest(name=names["good"], score=1, label="thumbs up"))
    rated = await stubs.calls.RateConversation(pb.RateConversationRequest(name=names["bad"], score=0))
    assert rated.conversation.score == 0
    assert [call.name for call in await calls(stubs, filter="score > 0.5")] == [good.call.name]
    assert [call.label for call in await calls(stubs, filter='label = "thumbs up"')] == ["thumbs up"]
    await stubs.calls.RateConversation(pb.RateConversationRequest(name=names["bad"]))
    assert not (await conversations(stubs, filter="conversation = bad"))[0].HasField("score")


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"score": math.nan}, {"score"}),
        ({"label": "x" * 129, "score": math.inf}, {"score", "label"}),
        ({"name": "nonsense", "label": "\0"}, {"name", "label"}),
    ],
)
async def test_a_rating_that_cannot_be_one_is_refused_with_every_problem(
    stubs: Stubs, change: dict[str, Any], fields: set[str]
) -> None:
    request = pb.RateConversationRequest(**({"name": "projects/default/conversations/x"} | change))
    with pytest.raises(ArgumentInvalid) as refused:
        await stubs.calls.RateConversation(request)
    assert {violation.field for violation in refused.value.violations} == fields


async def test_a_persons_conversation_is_gone_with_all_its_calls(stubs: Stubs) -> None:
    await record(stubs, new_call("Hello", conversation="a"), new_call("More", conversation="a"), new_call("Other"))
    request = pb.DeleteConversationsRequest(names=["projects/default/conversations/a"])
    assert (await stubs.calls.DeleteConversations(request)).deleted_call_count == 2
    assert (await stubs.calls.DeleteConversations(request)).deleted_call_count == 0
    assert len(await calls(stubs)) == len(await conversations(stubs)) == 1


async def test_a_project_sees_rates_and_removes_its_own_calls_alone(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, OTHER)
    theirs = new_call("Secret", project=OTHER, conversation="a")
    await record(stubs, theirs)
    mine = await store.stubs(role=Role.CLIENT, project="projects/default")
    assert await calls(mine) == []
    with pytest.raises(PermissionDenied):
        await calls(mine, project=OTHER)
    with pytest.raises(CallNotFound):
        await mine.calls.GetCall(pb.GetCallRequest(name=theirs.call.name))
    with pytest.raises(CallNotFound):
        await mine.calls.RateConversation(pb.RateConversationRequest(name=f"{OTHER}/conversations/a", score=1))
    with pytest.raises(PermissionDenied):
        await mine.calls.DeleteConversations(pb.DeleteConversationsRequest(names=[f"{OTHER}/conversations/a"]))
    # A call's hashes find calls of its own project alone.
    await record(stubs, new_call("Secret", "yes", "More"))
    assert (await calls(mine))[0].conversation != f"{OTHER}/conversations/a"
    # The proxy of one project records nothing in another.
    proxy = await store.stubs(role=Role.SERVICE, project="projects/default")
    assert (await record(proxy, new_call("Planted", project=OTHER))).rejected_count == 1
    assert len(await calls(stubs, project=OTHER)) == 1


async def test_the_oldest_calls_make_room_for_new_ones(connection: Any, database_url: str) -> None:
    made = [new_call("x" * 10_000, conversation=f"c{number}") for number in range(300)]
    async with running_store(database_url, recorded_bytes_per_project=1024 * 1024) as store:
        stubs = await store.stubs()
        for start in range(0, 300, 100):
            await record(stubs, *made[start : start + 100])
        kept = await calls(stubs)
        assert [call.name for call in kept] == [call.call.name for call in made[::-1]][: len(kept)]
        assert 90 < len(kept) == len(await conversations(stubs)) < 95  # of 10 KB, and 1 KiB besides
        assert await connection.fetchval("select size_bytes from recorded_size") <= 1024 * 1024


async def test_expired_calls_and_their_conversations_are_deleted(connection: Any, database: Database, stubs: Stubs):
    table = CallTable(database, max_bytes=1 << 30, metrics=StoreMetrics())
    await record(stubs, new_call("old", conversation="old"), new_call("old", conversation="both"))
    await connection.execute("update recorded_call set expires_at = now() - interval '1 second'")
    await record(stubs, new_call("new", conversation="both"))
    await RecordRetention(table=table).run_once()
    assert [(each.name[-4:], each.call_count) for each in await conversations(stubs)] == [("both", 1)]
    left = await connection.fetchval("select sum(size_bytes) from recorded_call")
    assert await connection.fetchval("select size_bytes from recorded_size") == left


async def test_a_call_that_cannot_be_stored_is_refused_with_every_problem_and_nothing_is(stubs: Stubs) -> None:
    bad = new_call("Hello", retention_s=5, model="a\0b")
    bad.end_hash = b"short"
    bad.call.name = "nonsense"
    with pytest.raises(ArgumentInvalid) as refused:
        await record(stubs, new_call("Fine"), bad)
    fields = {violation.field.removeprefix("calls[1].") for violation in refused.value.violations}
    assert fields == {"call.name", "call.model", "end_hash", "retention"}
    assert await calls(stubs) == []
    with pytest.raises(ArgumentInvalid):
        await record(stubs, new_call("x" * 1_100_000))


async def test_texts_with_nul_and_bytes_that_are_no_utf8_come_back_as_they_were(stubs: Stubs) -> None:
    strange = new_call("Hello")
    strange.call.content.messages_json = b'[{"role": "user", "content": "\\u0000 \\ud800 \xf0\x9f\x8d\x8b \xff"}]\0'
    await record(stubs, strange)
    assert (await calls(stubs, with_content=True))[0].content == strange.call.content


async def test_calls_that_arrive_at_once_are_all_counted(stubs: Stubs) -> None:
    await asyncio.gather(
        *(record(stubs, *(new_call(f"{number}", conversation="same") for _ in range(5))) for number in range(8))
    )
    assert [each.call_count for each in await conversations(stubs)] == [40]
