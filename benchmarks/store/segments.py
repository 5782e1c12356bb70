"""Segments of spans: bytes in PostgreSQL per span before and after they are moved, and what a read by ranges costs.

Rollouts of yesterday are made with 100 spans each, in five chunks of 20 of about 600 bytes that have only their names in
common. The store's own role moves them into segments, as it does every ten minutes, and then returns the disk of the day.
Bytes are those of the tables of spans with their indexes. The same random rollouts are read before and after, one by one and
all in order; ratios of these hold on a busy machine, times do not. Run
`python -m benchmarks.store.segments --spans N [--storage URL]`: a folder by default, or `s3://bucket/prefix` with
`AWS_ENDPOINT_URL`. Adds the run to benchmarks/results/segments.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import uvloop
import zstandard

from benchmarks import outcome
from benchmarks.store import spans as made
from benchmarks.store.stand import postgres_cpu_seconds, rss_mb, running_postgres
from fulmen.ids import DEFAULT_PROJECT, uuid7s
from fulmen.store.v1 import span_pb2
from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.segments.mover import SegmentMover
from fulmen_store.segments.table import SegmentTable
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.chunks import Chunk, NewChunk
from fulmen_store.spans.table import SpanParent, SpanTable

SPANS_PER_CHUNK = 20
CHUNKS_PER_ROLLOUT = 5
SPANS_PER_ROLLOUT = SPANS_PER_CHUNK * CHUNKS_PER_ROLLOUT
ROLLOUTS_PER_BATCH = 100
PAYLOADS = 512
READS = 200
PARENTS_PER_READ = 16
SEGMENT_BYTES = 32 * 1024 * 1024
DAY_MS = 86_400_000
GOAL_BYTES = 10.0
TABLES = """
select sum(pg_total_relation_size(c.oid))::bigint from pg_class c
where c.oid in ('span_extent'::regclass, 'span_segment'::regclass)
    or c.oid in (select inhrelid from pg_inherits where inhparent = 'span_chunk'::regclass)
"""
ENDED = """
with r as (
    insert into rollout (id, project_id, sort_priority, mode, request) select id, 1, 0, 1, '' from unnest($1::uuid[]) id
)
insert into rollout_end (rollout_id, project_id, group_size, state, failure_kind, ended_at)
select id, 1, 1, 4, 0, now() - interval '2 hours' from unnest($1::uuid[]) id
"""


class CountedReads(Blobs):
    """Counts requests and bytes of ranges, as the store asks for them; an object store joins near ones."""

    calls = size_bytes = 0

    async def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Counts, and reads."""
        self.calls += 1
        self.size_bytes += sum(size for _, size in ranges)
        return await super().read_ranges(key, ranges)


def _payload() -> bytes:
    texts = [random.randbytes(20).hex() for _ in range(SPANS_PER_CHUNK * made.ATTRIBUTES)]
    records = [
        span_pb2.SpanRecord(otlp_span=made.span(number, texts).SerializeToString(), scope="bench")
        for number in range(SPANS_PER_CHUNK)
    ]
    return zstandard.ZstdCompressor(level=1).compress(span_pb2.SpanBatch(spans=records).SerializeToString())


async def _fill(connection: asyncpg.Connection, table: SpanTable, rollouts: int) -> list[UUID]:
    """Makes ended rollouts of yesterday, with their spans."""
    yesterday = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    await connection.fetch("select create_span_partition($1)", yesterday)
    start_ms = (yesterday - datetime.date(1970, 1, 1)).days * DAY_MS
    payloads = [_payload() for _ in range(PAYLOADS)]
    everything: list[UUID] = []
    for start in range(0, rollouts, ROLLOUTS_PER_BATCH):
        count = min(ROLLOUTS_PER_BATCH, rollouts - start)
        ids = [_at(start_ms + (start + each) * (DAY_MS - 1) // rollouts) for each in range(count)]
        await connection.execute(ENDED, ids)
        refused = await table.append(
            [
                NewChunk(chunk=_chunk(rollout_id, chunk_id, random.choice(payloads)), project=DEFAULT_PROJECT)
                for rollout_id in ids
                for chunk_id in uuid7s(CHUNKS_PER_ROLLOUT)
            ]
        )
        assert not refused
        everything += ids
    return everything


def _at(unix_ms: int) -> UUID:
    """Makes a UUIDv7 of a moment."""
    return UUID(int=unix_ms << 80 | 7 << 76 | random.getrandbits(12) << 64 | 2 << 62 | random.getrandbits(62))


def _chunk(rollout_id: UUID, chunk_id: UUID, payload: bytes) -> Chunk:
    now = time.time_ns()
    return Chunk(
        rollout_id=rollout_id, attempt=1, chunk_id=chunk_id, span_count=SPANS_PER_CHUNK, codec=2, start_ns=now,
        end_ns=now + 1_000_000, payload=payload,
    )  # fmt: skip


async def _read(table: SpanTable, ids: Sequence[UUID]) -> AsyncIterator[int]:
    """Reads rollouts, 16 at a time as StreamSpans does; yields the number of chunks."""
    for start in range(0, len(ids), PARENTS_PER_READ):
        parents = [
            SpanParent(project=DEFAULT_PROJECT, rollout_id=each) for each in ids[start : start + PARENTS_PER_READ]
        ]
        heads = [head for found in await table.heads(parents) for head in found]
        yield len([chunk async for chunk in table.read(heads)])


async def _reads(table: SpanTable, blobs: CountedReads, ids: Sequence[UUID]) -> dict[str, Any]:
    """Measures reads: of some rollouts one by one, and of all in order."""
    blobs.calls = blobs.size_bytes = 0
    times = []
    for each in random.sample(list(ids), min(READS, len(ids))):
        started = time.perf_counter()
        assert [count async for count in _read(table, [each])] == [CHUNKS_PER_ROLLOUT]
        times.append(time.perf_counter() - started)
    one = {"requests": blobs.calls / len(times), "bytes": round(blobs.size_bytes / len(times))}
    blobs.calls = blobs.size_bytes = 0
    part = ids[: 20 * READS]
    started = time.perf_counter()
    assert sum([count async for count in _read(table, part)]) == len(part) * CHUNKS_PER_ROLLOUT
    took = time.perf_counter() - started
    return {
        "one_rollout_ms": round(statistics.median(times) * 1000, 2),
        "one_rollout": one,
        "in_order_spans_per_s": round(len(part) * SPANS_PER_ROLLOUT / took),
        "in_order_requests_per_rollout": round(blobs.calls / len(part), 3),
    }


async def _move(database: Database, table: SpanTable, blobs: Blobs, postgres: Path) -> dict[str, Any]:
    mover = SegmentMover(
        table=SegmentTable(database), blobs=blobs, read_chunks=table.read_rows, segment_bytes=SEGMENT_BYTES, after_s=3600,
        metrics=StoreMetrics(),
    )  # fmt: skip
    started, own, server = time.perf_counter(), time.process_time(), postgres_cpu_seconds(postgres)
    await mover.run_once()
    moved = {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_s": round(time.process_time() - own, 2),
        "postgres_cpu_s": round(postgres_cpu_seconds(postgres) - server, 2),
        "resident_mb": round(rss_mb(os.getpid())),
    }
    # The next pass finds the day empty and returns its disk.
    await mover.run_once()
    return moved


async def measure(folder: Path, storage: str, spans: int) -> dict[str, Any]:
    """Makes the spans, moves them, and returns what was measured."""
    rollouts = spans // SPANS_PER_ROLLOUT
    async with running_postgres(folder) as dsn:
        await migrate(dsn)
        database = await connect(dsn, connections=4, start_limit_s=30)
        connection = await asyncpg.connect(dsn)
        names, blobs = ProjectNames(database), CountedReads(open_storage(storage))
        names.learn(1, DEFAULT_PROJECT)
        table = SpanTable(database, names, blobs=blobs)
        empty = await connection.fetchval(TABLES)
        ids = await _fill(connection, table, rollouts)
        await connection.execute("vacuum analyze")
        before, read_before = await connection.fetchval(TABLES) - empty, await _reads(table, blobs, ids)
        moved = await _move(database, table, blobs, folder / "data")
        await connection.execute("vacuum analyze")
        after, read_after = await connection.fetchval(TABLES) - empty, await _reads(table, blobs, ids)
        segments = await connection.fetchrow("select count(*) as count, sum(size_bytes) as size from span_segment")
        assert await connection.fetchval("select count(*) from span_chunk") == 0
        assert await connection.fetchval("select count(*) from span_extent") == rollouts
        await connection.close()
        await database.close()
    return {
        "spans": spans,
        "storage": storage.partition(":")[0],
        "postgres_bytes_per_span": {"before": round(before / spans, 2), "after": round(after / spans, 2)},
        "segments": {"count": segments["count"], "bytes_per_span": round(int(segments["size"]) / spans, 1)},
        "move": moved | {"us_per_span": round((moved["cpu_s"] + moved["postgres_cpu_s"]) / spans * 1e6, 2)},
        "read_before": read_before,
        "read_after": read_after,
    }


def main() -> None:
    """Measures one number of spans over one storage, and adds it to the results."""
    parser = argparse.ArgumentParser(description="Measures segments of spans.")
    parser.add_argument("--spans", type=int, default=100_000, help="spans to make; 100 for each rollout")
    parser.add_argument("--storage", default="", help="URL of the storage; a folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        storage = arguments.storage or f"file://{folder}/segments"
        found = uvloop.run(measure(folder, storage, arguments.spans))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    path = outcome.FOLDER / "segments.json"
    raw = json.loads(path.read_text(encoding="utf-8"))["raw"] if path.exists() else {}
    raw[f"{arguments.spans} spans, {found['storage']}"] = found
    largest = max(raw.values(), key=lambda run: run["spans"])["postgres_bytes_per_span"]["after"]
    claims = [
        outcome.claim("PostgreSQL per span in a segment", largest, "bytes", goal=GOAL_BYTES, better="lower"),
        outcome.claim(
            "PostgreSQL for 10^10 spans (extrapolated)", largest * 10, "GB", goal=GOAL_BYTES * 10, better="lower"
        ),
    ]
    outcome.write("segments", method=__doc__ or "", raw=raw, claims=claims)


if __name__ == "__main__":
    main()
