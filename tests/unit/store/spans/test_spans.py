"""Packing, filtering and listing spans, without a database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from uuid import UUID

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid
from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.store.v1 import span_pb2
from fulmen_store.spans.chunks import BYTES_PER_CHUNK, SPANS_PER_CHUNK, Chunk, LooseSpans, NewChunk, compress
from fulmen_store.spans.span_filter import SpanFacts, SpanFilter
from fulmen_store.spans.spans import Spans
from fulmen_store.transport.otlp.codec import export_from_json, loose_spans
from fulmen_store.transport.wire.spans import Listing

ROLLOUTS = [uuid7(1_700_000_000_000 + number) for number in range(3)]


class Table:
    """Keeps chunks in memory, each id once; knows two rollouts."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[UUID, int, UUID], Chunk] = {}

    async def append(self, chunks: Sequence[NewChunk]) -> dict[int, str]:
        """Stores chunks."""
        for new in chunks:
            if new.chunk.rollout_id != ROLLOUTS[2]:
                chunk = new.chunk
                self.chunks.setdefault((chunk.rollout_id, chunk.attempt, chunk.chunk_id), chunk)
        return {position: "unknown" for position, new in enumerate(chunks) if new.chunk.rollout_id == ROLLOUTS[2]}


def loose(rollout: int, count: int, *, size: int = 1, attempt: int = 1, seed: int = 0) -> LooseSpans:
    """Makes spans of some size each."""
    records = [span_pb2.SpanRecord(scope=f"{seed}.{number}", otlp_span=bytes(size)) for number in range(count)]
    return LooseSpans(
        rollout_id=ROLLOUTS[rollout],
        attempt=attempt,
        span_count=count,
        start_ns=5,
        end_ns=9,
        raw=span_pb2.SpanBatch(spans=records).SerializeToString(),
        project=DEFAULT_PROJECT,
    )


def scopes(chunk: Chunk) -> list[str]:
    """Returns what tells the spans of a chunk apart."""
    raw = zstandard.ZstdDecompressor().decompress(chunk.payload)
    return [record.scope for record in span_pb2.SpanBatch.FromString(raw).spans]


async def packed(table: Table, *exports: Sequence[LooseSpans]) -> list[list[str]]:
    """Appends exports that arrive together."""
    spans = Spans(table=table)
    waiting = [asyncio.create_task(spans.append_loose(export)) for export in exports]
    await asyncio.sleep(0)  # All of them are in the queue before the packer looks.
    roles = [asyncio.create_task(role.run()) for role in (spans.packer, spans.committer)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*waiting)
    for role in roles:
        role.cancel()
    await asyncio.gather(*roles, return_exceptions=True)
    return answers


async def test_what_arrives_together_shares_chunks_by_attempt() -> None:
    table = Table()

    answers = await packed(
        table, [loose(0, 3, seed=1), loose(1, 1, seed=2)], [loose(0, 2, seed=3)], [loose(0, 1, attempt=2), loose(2, 4)]
    )

    assert answers == [["", ""], [""], ["", "unknown"]]
    found = {(chunk.rollout_id, chunk.attempt): scopes(chunk) for chunk in table.chunks.values()}
    assert found == {
        (ROLLOUTS[0], 1): ["1.0", "1.1", "1.2", "3.0", "3.1"],
        (ROLLOUTS[1], 1): ["2.0"],
        (ROLLOUTS[0], 2): ["0.0"],
    }
    assert {(chunk.start_ns, chunk.end_ns) for chunk in table.chunks.values()} == {(5, 9)}


async def test_chunks_stay_below_their_limits() -> None:
    table = Table()

    await packed(
        table, *([loose(0, 200, seed=seed)] for seed in range(6)), [loose(1, 3, size=BYTES_PER_CHUNK // 3)] * 2
    )

    small = [chunk.span_count for chunk in table.chunks.values() if chunk.rollout_id == ROLLOUTS[0]]
    assert sum(small) == 1200
    assert max(small) <= SPANS_PER_CHUNK


async def test_the_same_spans_alone_make_the_same_chunk() -> None:
    table = Table()
    for _ in range(2):
        await packed(table, [loose(0, 3)])
    assert len(table.chunks) == 1


TEXTS = st.sampled_from(["", "a", "ab", "7", "true", "1.5"])
FACTS = st.builds(
    lambda span_id, name, start, length, error, call, attributes: SpanFacts(
        span_id=span_id,
        name=name,
        start_ns=start,
        end_ns=start + length,
        is_error=error,
        is_model_call=call,
        attributes=lambda: attributes,
    ),
    st.sampled_from([b"12345678", b"87654321"]),
    TEXTS,
    st.integers(1, 20),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.dictionaries(TEXTS, st.one_of(TEXTS, st.booleans(), st.integers(0, 9), st.sampled_from([1.5, 7.0]))),
)
NUMBERS = st.none() | st.integers(0, 30)
FILTERS = st.builds(
    SpanFilter,
    names=st.frozensets(TEXTS, max_size=2),
    name_prefix=TEXTS,
    attributes=st.dictionaries(TEXTS, TEXTS, max_size=1),
    end_min_ns=NUMBERS,
    start_max_ns=NUMBERS,
    duration_min_ns=NUMBERS,
    errors_only=st.booleans(),
    model_calls_only=st.booleans(),
    span_ids=st.frozensets(st.sampled_from([b"12345678"]), max_size=1),
)


@given(facts=FACTS, wanted=FILTERS)
def test_a_chunk_of_a_span_that_matches_is_never_passed_over(facts: SpanFacts, wanted: SpanFilter) -> None:
    if wanted.matches(facts):
        assert wanted.may_match_chunk(start_ns=facts.start_ns, end_ns=facts.end_ns)
        assert wanted.may_match_chunk(start_ns=0, end_ns=0)
    assert SpanFilter().matches(facts)


@given(
    places=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 20)), max_size=40),
    limit=st.integers(1, 7),
    per_chunk=st.integers(1, 5),
)
def test_pages_together_are_the_sorted_spans_each_once(
    places: list[tuple[int, int, int]], limit: int, per_chunk: int
) -> None:
    rollout = uuid7()
    times = {(attempt, number): start for start, attempt, number in places}
    spans = [(times[attempt, number], attempt, number) for _, attempt, number in places]
    chunks = [
        _chunk(rollout, attempt, members[start : start + per_chunk])
        for attempt in {each[1] for each in spans}
        if (members := [each for each in spans if each[1] == attempt])
        for start in range(0, len(members), per_chunk)
    ]
    found: list[tuple[int, int, int]] = []
    after = None
    while True:
        listing = Listing(DEFAULT_PROJECT, after=after, limit=limit + 1, max_bytes=10**6, wanted=None)
        for chunk in chunks:
            listing.add(chunk)
        assert listing.duplicates == len(spans) - len(set(spans))
        page = listing.spans()[:limit]
        for each in page:
            span = trace_pb2.Span.FromString(each.record.otlp_span)
            found.append((span.start_time_unix_nano, each.attempt.number, int.from_bytes(span.span_id)))
        if len(listing.spans()) <= limit:
            break
        after = page[-1].key
    assert found == sorted(set(spans))


def _chunk(rollout: UUID, attempt: int, members: list[tuple[int, int, int]]) -> Chunk:
    records = [
        span_pb2.SpanRecord(
            otlp_span=trace_pb2.Span(start_time_unix_nano=start, span_id=number.to_bytes(8)).SerializeToString()
        )
        for start, _, number in members
    ]
    raw = span_pb2.SpanBatch(spans=records).SerializeToString()
    return Chunk(
        rollout_id=rollout, attempt=attempt, chunk_id=uuid7(), span_count=len(members), codec=2, start_ns=0, end_ns=0,
        payload=compress(raw),
    )  # fmt: skip


@given(body=st.binary(max_size=200))
def test_bytes_that_are_no_export_are_refused_and_nothing_else_happens(body: bytes) -> None:
    for take in (export_from_json, lambda raw: loose_spans(raw, own=None)):
        with contextlib.suppress(ArgumentInvalid):
            take(body)


@given(
    names=st.lists(st.text(max_size=5), max_size=20),
    values=st.lists(st.text(max_size=5), max_size=3),
    scope=st.text(max_size=5),
)
def test_an_export_is_taken_apart_and_put_together_without_a_change(
    names: list[str], values: list[str], scope: str
) -> None:
    attributes = [{"key": "k", "value": {"string_value": value}} for value in values]
    spans = [
        {"name": name, "span_id": bytes([number] * 8), "start_time_unix_nano": number, "attributes": attributes}
        for number, name in enumerate(names, start=1)
    ]
    request = trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[
            {"resource": {"attributes": attributes}, "scope_spans": [{"scope": {"name": scope}, "spans": spans}]}
        ]
    )
    own = AttemptName(project=DEFAULT_PROJECT, rollout_id=ROLLOUTS[0], number=3)

    found, *refused = loose_spans(request.SerializeToString(), own=own)

    assert refused == [0, 0, 0]
    records = [record for part in found for record in span_pb2.SpanBatch.FromString(part.raw).spans]
    sent = request.resource_spans[0]
    assert [trace_pb2.Span.FromString(record.otlp_span) for record in records] == list(sent.scope_spans[0].spans)
    assert {record.scope for record in records} <= {scope}
    assert {record.otlp_resource for record in records} <= {sent.resource.SerializeToString()}
    assert [(part.start_ns, part.end_ns, part.project) for part in found] == (
        [(1, 0, DEFAULT_PROJECT)] if names else []
    )


def test_a_span_that_is_too_large_is_left_out_and_counted() -> None:
    request = trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[{"scope_spans": [{"spans": [{"name": "x" * (BYTES_PER_CHUNK + 1)}, {"name": "y"}]}]}]
    )
    own = AttemptName(project=DEFAULT_PROJECT, rollout_id=ROLLOUTS[0], number=1)

    split = loose_spans(request.SerializeToString(), own=own)

    assert ([part.span_count for part in split.loose], split.homeless, split.oversized) == ([1], 0, 1)


@pytest.mark.parametrize(
    "document",
    [b"[]", b'{"resourceSpans": 1}', b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}'],
)
def test_json_of_another_shape_is_refused(document: bytes) -> None:
    with pytest.raises(ArgumentInvalid):
        export_from_json(document)
