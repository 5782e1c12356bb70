"""Spans are watched while a rollout runs: each chunk once, from any replica, until all is over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid, CursorInvalid, Draining, PermissionDenied, QuotaExceeded, RolloutNotFound
from fulmen.ids import parse_rollout_name, uuid7
from fulmen.store.v1 import span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen.type.v1 import model_call_pb2
from fulmen_store.database.database import Database
from fulmen_store.rollouts.feed_cursor import Cursor
from fulmen_store.spans import following
from fulmen_store.spans.table import SpanParent
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, cancel, create, replicas
from tests.support.store.spans import append, chunk_of, packed, span


@pytest.fixture(autouse=True)
def no_long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a watch soon after the end of what is watched."""
    monkeypatch.setattr(following, "LINGER_S", 0.1)


class Watch:
    """An open stream."""

    def __init__(self, stubs: Stubs, parent: str, **request: Any) -> None:
        self.stream: Any = stubs.spans.WatchSpans(pb.WatchSpansRequest(parent=parent, **request))

    async def next(self) -> list[str]:
        """Returns the ids of the chunks of the next message that has some."""
        return [chunk.chunk_id for chunk in await self.chunks()]

    async def chunks(self) -> list[span_pb2.SpanChunk]:
        """Returns the chunks of the next message that has some."""
        async with asyncio.timeout(LIMIT_S):
            async for message in self.stream:
                if message.chunks:
                    return list(message.chunks)
        raise AssertionError("the store closed the stream")

    async def cursor(self) -> str:
        """Returns the cursor of the next message that has one."""
        async with asyncio.timeout(LIMIT_S):
            async for message in self.stream:
                if message.cursor:
                    return str(message.cursor)
        raise AssertionError("the store closed the stream")

    async def spans(self) -> list[pb.AttemptSpan]:
        """Returns the spans until the store closes the stream."""
        async with asyncio.timeout(LIMIT_S):
            return [span async for message in self.stream for span in message.spans]

    async def rest(self) -> list[str]:
        """Returns the ids of the chunks until the store closes the stream."""
        async with asyncio.timeout(LIMIT_S):
            return [chunk.chunk_id async for message in self.stream for chunk in message.chunks]


async def test_what_is_stored_comes_first_then_each_new_chunk_once_until_the_end(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    first, second, late = _in_order(*(chunk_of(assignment.attempt) for _ in range(3)))
    await append(stubs, first)
    watch = Watch(stubs, name)
    assert await watch.next() == [first.chunk_id]
    await append(stubs, first)
    await append(stubs, second)
    assert await watch.next() == [second.chunk_id]
    await append(stubs, late)
    await runner.complete([assignment])
    assert await watch.rest() == [late.chunk_id]
    assert await Watch(stubs, name).rest() == [first.chunk_id, second.chunk_id, late.chunk_id]


async def test_while_nothing_is_new_a_poll_reads_no_chunk_and_no_rollout(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def noted(fetch: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        def run(self: Database, name: str, *arguments: object) -> Awaitable[Any]:
            ran.append(name)
            return fetch(self, name, *arguments)

        return run

    (name,) = await create(stubs)
    first, second = _in_order(*(chunk_of(f"{name}/attempts/1") for _ in range(2)))
    await append(stubs, first)
    watch = Watch(stubs, name)
    assert await watch.next() == [first.chunk_id]
    for method in ("fetch", "fetch_of_days"):
        monkeypatch.setattr(Database, method, noted(getattr(Database, method)))
    async with asyncio.timeout(LIMIT_S):
        while ran.count("watched_chunks") < 5:  # polls of the store
            await asyncio.sleep(0.01)
            assert not {"chunk_heads", "get_rollouts"} & set(ran)
    await append(stubs, second)
    assert await watch.next() == [second.chunk_id]


async def test_an_attempt_is_watched_to_its_own_end(stubs: Stubs) -> None:
    (name,) = await create(stubs, policy={"max_attempts": 2, "retry_backoff": {"seconds": 50}})
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    own, other = chunk_of(assignment.attempt), chunk_of(f"{name}/attempts/2")
    both = [chunk.chunk_id for chunk in _in_order(own, other)]
    await append(stubs, own, other)
    watch = Watch(stubs, assignment.attempt)
    assert await watch.next() == [own.chunk_id]
    await runner.complete([assignment], failure_kind=4)
    assert await watch.rest() == []
    whole = Watch(stubs, name)
    assert await whole.next() == both
    await cancel(stubs, name)
    assert await whole.rest() == []


async def test_chunks_that_another_replica_stores_are_seen(database_url: str) -> None:
    async with replicas(database_url, 2) as (one, two):
        here, there = await one.stubs(), await two.stubs()
        (name,) = await create(here)
        watch = Watch(here, name)
        chunk = chunk_of(f"{name}/attempts/1")
        await append(there, chunk)
        assert await watch.next() == [chunk.chunk_id]


async def test_only_matching_spans_are_watched_and_a_repeated_one_comes_once(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    attempt = f"{name}/attempts/1"
    wanted, other = span("wanted"), span("other")
    watch = Watch(stubs, name, filter=pb.SpanFilter(names=["wanted"]))
    await append(stubs, packed(attempt, wanted, other))
    assert [chunk.span_count for chunk in await watch.chunks()] == [1]
    again, end = packed(attempt, wanted), packed(attempt, span("wanted"))
    await append(stubs, again)
    await append(stubs, end)
    await cancel(stubs, name)
    assert await watch.rest() == [end.chunk_id]


async def test_messages_are_bounded_in_bytes(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    chunks = []
    for _ in range(3):
        record = span_pb2.SpanRecord(otlp_span=span("big", blob=os.urandom(350_000).hex()).SerializeToString())
        chunks.append(
            span_pb2.SpanChunk(
                attempt=f"{name}/attempts/1", chunk_id=str(uuid7()), span_count=1, codec=span_pb2.SPAN_CODEC_IDENTITY,
                payload=span_pb2.SpanBatch(spans=[record]).SerializeToString(),
            )
        )  # fmt: skip
    await append(stubs, *chunks)
    watch = Watch(stubs, name)
    assert [await watch.next() for _ in range(3)] == [[chunk.chunk_id] for chunk in _in_order(*chunks)]


async def test_an_attempt_key_watches_its_own_attempt_only(store: StoreHandle, stubs: Stubs) -> None:
    await create(stubs, 2)
    own, other = await (await Runner(stubs).open()).take(2)
    agent = await store.stubs(token=own.attempt_key)
    chunk = chunk_of(own.attempt)
    await append(agent, chunk)
    assert await Watch(agent, own.attempt).next() == [chunk.chunk_id]
    for parent in (other.attempt, own.rollout.name):
        with pytest.raises(PermissionDenied):
            await Watch(agent, parent).rest()


async def test_what_does_not_exist_or_is_malformed_cannot_be_watched(stubs: Stubs) -> None:
    with pytest.raises(RolloutNotFound):
        await Watch(stubs, f"projects/default/rollouts/{uuid7()}").rest()
    with pytest.raises(ArgumentInvalid):
        await Watch(stubs, "x").rest()


async def test_a_replica_that_shuts_down_asks_watchers_to_open_the_stream_again(
    store: StoreHandle, stubs: Stubs
) -> None:
    (name,) = await create(stubs)
    chunk = chunk_of(f"{name}/attempts/1")
    await append(stubs, chunk)
    watch = Watch(stubs, name)
    assert await watch.next() == [chunk.chunk_id]
    drain = asyncio.create_task(store.parts.drain())
    with pytest.raises(Draining):
        await watch.rest()
    await drain


async def test_a_quiet_watch_says_that_it_lives(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "KEEP_ALIVE_S", 0.1)
    (name,) = await create(stubs)
    stream: AsyncIterator[pb.WatchSpansResponse] = stubs.spans.WatchSpans(pb.WatchSpansRequest(parent=name))
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            message = await anext(stream)
            assert message == pb.WatchSpansResponse(cursor=message.cursor)
            assert message.cursor


async def test_a_rollout_with_too_many_chunks_is_not_watched_on(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_CHUNKS", 2)
    (name,) = await create(stubs)
    await append(stubs, *(chunk_of(f"{name}/attempts/1") for _ in range(3)))
    with pytest.raises(QuotaExceeded, match="more than 2 chunks"):
        await Watch(stubs, name).rest()


async def test_a_watch_resumes_after_the_last_cursor(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    attempt = f"{name}/attempts/1"
    first, second = chunk_of(attempt), chunk_of(attempt)
    await append(stubs, first)
    cursor = await Watch(stubs, name).cursor()
    await append(stubs, second)
    await cancel(stubs, name)
    came = await Watch(stubs, name, cursor=cursor).rest()
    assert second.chunk_id in came
    async with asyncio.timeout(LIMIT_S):
        while {first.chunk_id, second.chunk_id} & set(came):  # another transaction may have been older than theirs
            cursor = await Watch(stubs, name).cursor()
            came = await Watch(stubs, name, cursor=cursor).rest()


async def test_what_was_being_written_at_a_cursor_comes_after_it(stubs: Stubs, connection: asyncpg.Connection) -> None:
    (name,) = await create(stubs)
    first, second, late = (chunk_of(f"{name}/attempts/1") for _ in range(3))
    async with connection.transaction():
        await connection.execute("select pg_current_xact_id()")  # an older transaction that is still open
        await append(stubs, first)
        cursor = await Watch(stubs, name).cursor()
        await append(stubs, second)
    await append(stubs, late)
    await cancel(stubs, name)
    assert set(await Watch(stubs, name, cursor=cursor).rest()) >= {second.chunk_id, late.chunk_id}


async def test_a_cursor_of_something_else_is_refused(stubs: Stubs) -> None:
    name, other = await create(stubs, 2)
    cursor = await Watch(stubs, name).cursor()
    ahead = Cursor(xid=2**40).encode(
        SpanParent(project="projects/default", rollout_id=parse_rollout_name(name).rollout_id)
    )
    for parent, text in ((other, cursor), (f"{name}/attempts/1", cursor), (name, "x"), (name, ahead)):
        with pytest.raises(CursorInvalid):
            await Watch(stubs, parent, cursor=text).rest()


async def test_spans_come_unpacked_and_each_once(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    attempt = f"{name}/attempts/1"
    one, two = span("one"), span("two")
    call = model_call_pb2.ModelCallRecord(model="m", request_json=b"{}", completion_token_ids=b"1234")
    await append(stubs, packed(attempt, one, two, model_call=call.SerializeToString()))
    await append(stubs, packed(attempt, two))
    await cancel(stubs, name)
    whole = await Watch(stubs, name, form=pb.WATCHED_FORM_SPANS).spans()
    assert [(each.attempt, _span(each).name) for each in whole] == [(attempt, "one"), (attempt, "two")]
    assert model_call_pb2.ModelCallRecord.FromString(whole[0].span.model_call) == call


async def test_an_outline_has_no_contents_of_model_calls_and_no_long_texts(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    attempt = f"{name}/attempts/1"
    call = model_call_pb2.ModelCallRecord(
        model="m", policy="p", finish_reason="stop", request_json=b"{}", completion_token_ids=b"1234",
        completion_token_text=b"x", completion_token_sizes=[1],
    )  # fmt: skip
    big, small = span("big", long="x" * 100_000, short="s"), span("small", a="b")
    await append(stubs, packed(attempt, big, model_call=call.SerializeToString()), packed(attempt, small))
    await cancel(stubs, name)
    found = await Watch(stubs, name, form=pb.WATCHED_FORM_OUTLINES).spans()
    assert sum(each.ByteSize() for each in found) < 2000
    by_name = {_span(each).name: each for each in found}
    assert _span(by_name["small"]) == small
    kept = model_call_pb2.ModelCallRecord.FromString(by_name["big"].span.model_call)
    assert kept == model_call_pb2.ModelCallRecord(model="m", policy="p", finish_reason="stop")
    outline = _span(by_name["big"])
    assert (outline.span_id, outline.start_time_unix_nano) == (big.span_id, big.start_time_unix_nano)
    assert {pair.key: len(pair.value.string_value) for pair in outline.attributes} == {"long": 256, "short": 1}


async def test_spans_are_found_by_their_ids(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    one, two = span("one"), span("two")
    await append(stubs, packed(f"{name}/attempts/1", one, two))
    request = pb.ListSpansRequest(parent=name, filter=pb.SpanFilter(span_ids=[two.span_id]))
    assert [_span(each).name for each in (await stubs.spans.ListSpans(request)).spans] == ["two"]


async def test_one_statement_looks_for_all_watchers_of_a_replica(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    all_together = asyncio.Event()
    fetch = Database.fetch_of_days

    def noted(self: Database, name: str, rollout_ids: list[UUID], *arguments: object) -> Awaitable[Any]:
        if name == "watched_chunks" and len(rollout_ids) == 20:
            all_together.set()
        return fetch(self, name, rollout_ids, *arguments)

    monkeypatch.setattr(Database, "fetch_of_days", noted)
    names = await create(stubs, 20)
    watches = [Watch(stubs, name) for name in names]
    await asyncio.gather(*(watch.cursor() for watch in watches))
    async with asyncio.timeout(LIMIT_S):
        await all_together.wait()


def _span(found: pb.AttemptSpan) -> trace_pb2.Span:
    return trace_pb2.Span.FromString(found.span.otlp_span)


def _in_order(*chunks: span_pb2.SpanChunk) -> list[span_pb2.SpanChunk]:
    """Returns chunks as one message holds them; ids of one millisecond have no order in time."""
    return sorted(chunks, key=lambda chunk: chunk.chunk_id)
