"""Reading spans: filters, several parents, whole training runs, repeats, and payloads that lie elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import zstandard
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid, BlobMissing, PageTokenInvalid, PermissionDenied, RolloutNotFound
from fulmen.ids import uuid7
from fulmen.store.v1 import rollout_pb2, span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, create, get, pages_of, running_store
from tests.support.store.spans import append, chunk_of, packed, span, stored


async def listed(stubs: Stubs, **request: Any) -> list[str]:
    """Lists spans and returns their names."""
    pages = await pages_of(stubs.spans.ListSpans, pb.ListSpansRequest(**request))
    return [name for page in pages for name in names_of(page)]


def names_of(page: pb.ListSpansResponse) -> list[str]:
    """Returns the names of listed spans."""
    return [trace_pb2.Span.FromString(each.span.otlp_span).name for each in page.spans]


async def streamed(stubs: Stubs, **request: Any) -> list[str]:
    """Streams spans and returns their names."""
    found = []
    async for message in stubs.spans.StreamSpans(pb.StreamSpansRequest(**request)):
        for chunk in message.chunks:
            batch = span_pb2.SpanBatch.FromString(zstandard.ZstdDecompressor().decompress(chunk.payload))
            assert chunk.span_count == len(batch.spans)
            found += [trace_pb2.Span.FromString(record.otlp_span).name for record in batch.spans]
    return found


async def test_a_late_span_does_not_revive_a_failed_rollout(stubs: Stubs) -> None:
    (name,) = await create(stubs, policy={"max_attempts": 1})
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    await runner.complete([assignment], failure_kind=1, failure_message="gave up")
    before = await get(stubs, name)
    assert before.state == rollout_pb2.ROLLOUT_STATE_FAILED

    response = await append(stubs, packed(assignment.attempt, span("late")))

    assert response.accepted_count == 1
    assert await get(stubs, name) == before
    page = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=name))
    assert [each.attempt for each in page.spans] == [assignment.attempt]


async def test_spans_of_several_attempts_name_theirs(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    await append(stubs, packed(f"{name}/attempts/1", span("old", start=1)), packed(f"{name}/attempts/2", span("new")))

    page = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=name))

    assert [each.attempt for each in page.spans] == [f"{name}/attempts/1", f"{name}/attempts/2"]
    assert await listed(stubs, parent=f"{name}/attempts/2") == ["new"]


FILTERS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"chat", "tool.add", "tool.sub", "slow"}),
    ({"names": ["chat", "slow"]}, {"chat", "slow"}),
    ({"name_prefix": "tool."}, {"tool.add", "tool.sub"}),
    ({"attributes": {"user.id": "7"}}, {"tool.add", "tool.sub"}),
    ({"attributes": {"user.id": "7", "ok": "true"}}, {"tool.add"}),
    ({"attributes": {"temperature": "0.50"}}, {"chat"}),
    ({"attributes": {"absent": ""}}, set()),
    ({"min_end_time": Timestamp(seconds=15)}, {"slow"}),
    ({"max_start_time": Timestamp(seconds=2)}, {"chat"}),
    ({"min_duration": Duration(seconds=5)}, {"slow"}),
    ({"errors_only": True}, {"tool.sub"}),
    ({"model_calls_only": True}, {"chat"}),
    ({"model_calls_only": True, "errors_only": True}, set()),
]


@pytest.mark.parametrize(("wanted", "names"), FILTERS, ids=lambda value: ",".join(sorted(value)) or "none")
async def test_filters_select_the_same_spans_in_lists_and_in_streams(
    stubs: Stubs, wanted: dict[str, Any], names: set[str]
) -> None:
    (rollout,) = await create(stubs)
    attempt = f"{rollout}/attempts/1"
    await append(
        stubs,
        packed(attempt, span("chat", start=1, temperature=0.5, user_id="8"), model_call=b"x"),
        packed(
            attempt,
            span("tool.add", start=2, user_id=7, ok=True),
            span("tool.sub", start=3, user_id="7", ok=False, error=True),
            span("slow", start=10, seconds=5),
        ),
    )
    chosen = pb.SpanFilter(**wanted)

    assert set(await listed(stubs, parent=rollout, filter=chosen)) == names
    assert set(await streamed(stubs, parents=[rollout], filter=chosen)) == names


async def test_several_parents_are_listed_one_after_the_other_page_by_page(stubs: Stubs) -> None:
    rollouts = await create(stubs, 4)
    for number, rollout in enumerate(rollouts[:3]):
        chunk = packed(f"{rollout}/attempts/1", *(span(f"{number}.{place}", start=place) for place in range(5)))
        again = span_pb2.SpanChunk()
        again.CopyFrom(chunk)
        again.chunk_id = str(uuid7())
        await append(stubs, chunk, again)
    every = [f"{number}.{place}" for number in range(3) for place in range(5)]

    for size in (1, 4, 5, 7, 15, 100):
        pages = await pages_of(stubs.spans.ListSpans, pb.ListSpansRequest(parents=rollouts, page_size=size))
        assert all(len(page.spans) <= size for page in pages)
        assert [name for page in pages for name in names_of(page)] == every

    nobody = "projects/default/rollouts/01900000-0000-7000-8000-000000000000"
    with pytest.raises(RolloutNotFound):
        await stubs.spans.ListSpans(pb.ListSpansRequest(parents=[rollouts[0], nobody]))
    with pytest.raises(ArgumentInvalid):
        await stubs.spans.ListSpans(pb.ListSpansRequest())
    first = await stubs.spans.ListSpans(pb.ListSpansRequest(parents=rollouts, page_size=1))
    for token, filter_ in ((first.next_page_token, pb.SpanFilter(errors_only=True)), ("x", None)):
        with pytest.raises(PageTokenInvalid):
            await stubs.spans.ListSpans(pb.ListSpansRequest(parents=rollouts, page_token=token, filter=filter_))


async def test_a_page_token_holds_while_spans_are_added(stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    attempt = f"{rollout}/attempts/1"
    await append(stubs, packed(attempt, *(span(f"{place}", start=place) for place in (1, 3, 5))))
    first = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=rollout, page_size=2))
    await append(stubs, packed(attempt, span("2", start=2), span("4", start=4)))

    second = await stubs.spans.ListSpans(
        pb.ListSpansRequest(parent=rollout, page_size=2, page_token=first.next_page_token)
    )

    assert (names_of(first), names_of(second)) == (["1", "3"], ["4", "5"])


async def test_a_page_of_large_spans_ends_before_the_message_is_too_large(stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    large = [span(f"{place}", start=place, text="x" * 1_000_000) for place in range(12)]
    for each in large:
        await append(stubs, packed(f"{rollout}/attempts/1", each))
    pages = await pages_of(stubs.spans.ListSpans, pb.ListSpansRequest(parent=rollout, page_size=1000))

    assert [name for page in pages for name in names_of(page)] == [f"{place}" for place in range(12)]
    assert len(pages) >= 3


async def test_a_training_run_is_streamed_as_a_whole(store: StoreHandle, stubs: Stubs) -> None:
    rollouts = await create(stubs, 150, training_run="projects/default/trainingRuns/one")
    other = await create(stubs, 1, training_run="projects/default/trainingRuns/two")
    await append(
        stubs,
        *(packed(f"{rollout}/attempts/1", span(f"{place}")) for place, rollout in enumerate(rollouts)),
        packed(f"{other[0]}/attempts/1", span("other")),
    )

    in_order = {rollout: f"{place}" for place, rollout in enumerate(rollouts)}
    assert await streamed(stubs, training_run="projects/default/trainingRuns/one") == [
        in_order[each] for each in sorted(rollouts)
    ]
    assert await streamed(stubs, training_run="projects/default/trainingRuns/none") == []
    assert await streamed(
        stubs, training_run="projects/default/trainingRuns/one", filter=pb.SpanFilter(names=["7"])
    ) == ["7"]
    with pytest.raises(ArgumentInvalid):
        await streamed(stubs, training_run="projects/default/trainingRuns/one", parents=rollouts[:1])
    taken = await (await Runner(stubs).open()).take(1)
    agent = await store.stubs(token=taken[0].attempt_key)
    with pytest.raises(PermissionDenied):
        await streamed(agent, training_run="projects/default/trainingRuns/one")


async def test_a_chunk_that_nobody_can_read_hides_no_other(store: StoreHandle, stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    attempt = f"{rollout}/attempts/1"
    broken = packed(attempt, span("x"))
    broken.payload = b"this is no zstd frame"
    not_spans = packed(attempt, span("y"))
    not_spans.payload = zstandard.ZstdCompressor().compress(b"\xff\xff\xff")
    service = await store.stubs(role=Role.SERVICE)
    assert (await append(service, broken, packed(attempt, span("fine")), not_spans)).accepted_count == 3

    assert await listed(stubs, parent=rollout) == ["fine"]
    assert await streamed(stubs, parents=[rollout], filter=pb.SpanFilter(name_prefix="f")) == ["fine"]


async def test_large_payloads_lie_in_a_folder_and_come_back_unchanged(database_url: str, tmp_path: Path) -> None:
    async with running_store(
        database_url, blob_url=f"file://{tmp_path}/b", segment_bytes=0, blob_min_bytes=1000
    ) as store:
        stubs = await store.stubs()
        (rollout,) = await create(stubs)
        large, small = chunk_of(f"{rollout}/attempts/1", 200), chunk_of(f"{rollout}/attempts/1", 2)
        assert len(large.payload) > 1000 > len(small.payload)
        for _ in range(2):
            assert (await append(stubs, large, small)).accepted_count == 2

        (blob,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert blob.read_bytes() == large.payload
        assert {chunk.payload for chunk in await stored(stubs, rollout)} == {large.payload, small.payload}
        assert len(await listed(stubs, parent=rollout)) == 202

        blob.write_bytes(b"damaged")
        with pytest.raises(BlobMissing):
            await stored(stubs, rollout)
        blob.unlink()
        with pytest.raises(BlobMissing) as caught:
            await stubs.spans.ListSpans(pb.ListSpansRequest(parent=rollout))
        assert caught.value.metadata["blob"].startswith("spans/20")
        assert str(tmp_path) not in str(caught.value)


async def test_a_chunk_whose_payload_cannot_be_put_away_is_not_acknowledged(
    database_url: str, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "b").write_text("a file where the folder should be")
    async with running_store(database_url, blob_url=f"file://{tmp_path}/b", segment_bytes=0, blob_min_bytes=1) as store:
        stubs = await store.stubs()
        (rollout,) = await create(stubs)
        with pytest.raises(Exception, match="blob storage"):
            await append(stubs, chunk_of(f"{rollout}/attempts/1"))
        assert await connection.fetchval("select count(*) from span_chunk") == 0


async def test_many_chunks_are_streamed_in_small_messages(store: StoreHandle, stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    payload = uuid7().bytes * (128 * 1024)
    chunk = chunk_of(f"{rollout}/attempts/1", 1)
    service = await store.stubs(role=Role.SERVICE)
    for _ in range(40):
        chunk.chunk_id, chunk.payload = str(uuid7()), payload[: 2 * 1024 * 1024]
        await append(service, chunk)
    stream = stubs.spans.StreamSpans(pb.StreamSpansRequest(parents=[rollout]))
    async with asyncio.timeout(30):
        sizes = [message.ByteSize() async for message in stream]
    assert sum(sizes) > 80 * 1024 * 1024
    assert max(sizes) < 3 * 1024 * 1024
