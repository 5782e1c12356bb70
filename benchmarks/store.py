"""Benchmark of the store: durable rollout cycles, dispatch latency and span ingest, with CPU per operation.

Method: a real store process over an embedded PostgreSQL (fsync and synchronous_commit on); this process is the load
generator. Every rollout is created, committed, pushed over a lease stream, completed, committed and acknowledged.
Run `python -m benchmarks.store [--short]`; writes benchmarks/results/store.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import zstandard
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from benchmarks import outcome
from fulmen.ids import uuid7
from fulmen.local.postgres import EmbeddedPostgres
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import (
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    span_pb2,
    span_service_pb2,
    span_service_pb2_grpc,
)
from fulmen_service_kit.tokens import Role, TokenSigner

INPUT = b'{"question": "What is 17 + 25?", "pad": "' + b"x" * 300 + b'"}'
START_LIMIT_S = 60.0
RUNNERS = 4
SLOTS = 512
SPANS_PER_CHUNK = 256


@dataclass(slots=True)
class Bench:
    """What is measured, and against what."""

    channel: FulmenChannel
    store_pid: int
    postgres_folder: Path
    short: bool
    raw: dict[str, Any] = field(default_factory=dict)
    claims: list[outcome.Claim] = field(default_factory=list)

    def claim(self, name: str, value: float, unit: str, goal: float, better: str) -> None:
        """Records one claim."""
        self.claims.append(outcome.claim(name, value, unit, goal=goal, better=better))


def cpu_seconds(pids: list[int]) -> float:
    """Sums the CPU time of processes, user and system; those that are gone count as nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def postgres_pids(folder: Path) -> list[int]:
    """Returns the postmaster and its children."""
    postmaster = int((folder / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, children)]


async def measured(bench: Bench, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """Runs work and records the CPU of store, PostgreSQL and this process, per operation."""
    pids = postgres_pids(bench.postgres_folder)
    before = (cpu_seconds([bench.store_pid]), cpu_seconds(pids), time.process_time())
    started = time.perf_counter()
    operations = await work()
    seconds = time.perf_counter() - started
    after = (cpu_seconds([bench.store_pid]), cpu_seconds(pids), time.process_time())
    parts = zip(("store", "postgres", "generator"), before, after, strict=True)
    cpu = {f"{part}_us": round((end - start) / operations * 1e6, 1) for part, start, end in parts}
    bench.raw[name] = {"operations": operations, "seconds": round(seconds, 3), "cpu_per_operation": cpu}
    return operations, seconds


async def runner(channel: FulmenChannel, done: Callable[[int], None], stop: asyncio.Event) -> None:
    """Completes whatever it is given, until told to stop."""
    stream = lease_service_pb2_grpc.LeaseServiceStub(channel).StreamLeases()
    request = lease_service_pb2.StreamLeasesRequest
    await stream.write(request(open=lease_service_pb2.OpenSession(runner=lease_pb2.RunnerInfo(host="bench"))))
    await stream.write(request(demand=lease_service_pb2.Demand(credit_count=SLOTS)))
    while not stop.is_set():
        message = await stream.read()
        kind = message.WhichOneof("message")
        if kind == "assign":
            results = [
                lease_pb2.AttemptResult(
                    attempt=one.attempt, lease_id=one.lease_id, epoch=one.epoch, rewards=[{"value": 1.0}]
                )
                for one in message.assign.assignments
            ]
            complete = lease_service_pb2.CompletedAttempts(results=results, credit_count=len(results))
            await stream.write(request(complete=complete))
        elif kind == "ack":
            done(len(message.ack.acks))


async def cycles(bench: Bench, *, producers: int, per_request: int, seconds: float, streams: bool = False) -> int:
    """Creates and completes rollouts for so long; returns how many went the whole way.

    Each producer waits for the answer to a request before it sends the next one, by a call each or over a stream.
    """
    finished, created, stop, moved = 0, 0, asyncio.Event(), asyncio.Event()
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    deadline = time.perf_counter() + seconds

    def done(count: int) -> None:
        nonlocal finished
        finished += count
        moved.set()

    async def produce() -> None:
        nonlocal created
        stream = stub.StreamCreateRollouts() if streams else None
        while time.perf_counter() < deadline:
            rollouts = [rollout_pb2.Rollout(input=INPUT) for _ in range(per_request)]
            if stream is None:
                await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
            else:
                await stream.write(rollout_service_pb2.StreamCreateRolloutsRequest(rollouts=rollouts))
                await stream.read()
            created += per_request
            while created - finished > 20_000:
                moved.clear()
                await moved.wait()

    runners = [asyncio.create_task(runner(bench.channel, done, stop)) for _ in range(RUNNERS)]
    await asyncio.gather(*(produce() for _ in range(producers)))
    async with asyncio.timeout(START_LIMIT_S):
        while finished < created:
            moved.clear()
            await moved.wait()
    stop.set()
    for task in runners:
        task.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
    return finished


async def dispatch_latency(bench: Bench, count: int) -> list[float]:
    """Measures, on an idle queue, from the call of create to the assignment at the runner, in milliseconds."""
    rollouts = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    stream = lease_service_pb2_grpc.LeaseServiceStub(bench.channel).StreamLeases()
    request = lease_service_pb2.StreamLeasesRequest
    await stream.write(request(open=lease_service_pb2.OpenSession(runner=lease_pb2.RunnerInfo(host="bench"))))
    await stream.read()
    latencies = []
    for _ in range(count):
        await stream.write(request(demand=lease_service_pb2.Demand(credit_count=1)))
        started = time.perf_counter()
        message = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=INPUT)])
        creating = asyncio.create_task(rollouts.BatchCreateRollouts(message))
        while (answer := await stream.read()).WhichOneof("message") != "assign":
            pass
        latencies.append((time.perf_counter() - started) * 1000)
        await creating
        one = answer.assign.assignments[0]
        result = lease_pb2.AttemptResult(attempt=one.attempt, lease_id=one.lease_id, epoch=one.epoch)
        await stream.write(request(complete=lease_service_pb2.CompletedAttempts(results=[result])))
        while (await stream.read()).WhichOneof("message") != "ack":
            pass
    stream.cancel()
    return latencies


def span_payload() -> bytes:
    """Makes a chunk of spans of about 600 bytes each, compressed as a writer would."""
    spans = []
    for number in range(SPANS_PER_CHUNK):
        span = trace_pb2.Span(
            name="chat tiny-model",
            trace_id=secrets.token_bytes(16),
            span_id=secrets.token_bytes(8),
            start_time_unix_nano=time.time_ns(),
            end_time_unix_nano=time.time_ns() + number,
        )
        for key in range(8):
            value = common_pb2.AnyValue(string_value=secrets.token_hex(20))
            span.attributes.append(common_pb2.KeyValue(key=f"gen_ai.attribute.{key}", value=value))
        spans.append(span_pb2.SpanRecord(otlp_span=span.SerializeToString(), scope="bench"))
    raw = span_pb2.SpanBatch(spans=spans).SerializeToString()
    return zstandard.ZstdCompressor(level=3).compress(raw)


async def span_ingest(bench: Bench, seconds: float) -> int:
    """Appends chunks over streams for so long; returns how many spans were acknowledged."""
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    response = await stub.BatchCreateRollouts(
        rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout() for _ in range(64)])
    )
    attempts = [f"{rollout.name}/attempts/1" for rollout in response.rollouts]
    payloads = [span_payload() for _ in range(8)]
    deadline, accepted = time.perf_counter() + seconds, 0

    async def write(position: int) -> None:
        nonlocal accepted
        stream = span_service_pb2_grpc.SpanServiceStub(bench.channel).AppendSpans()
        in_flight = 0
        while time.perf_counter() < deadline or in_flight:
            if time.perf_counter() < deadline and in_flight < 4:
                chunks = [
                    span_pb2.SpanChunk(
                        attempt=attempts[(position + index) % len(attempts)],
                        chunk_id=str(uuid7()),
                        span_count=SPANS_PER_CHUNK,
                        codec=span_pb2.SPAN_CODEC_ZSTD,
                        payload=payloads[index % len(payloads)],
                    )
                    for index in range(8)
                ]
                await stream.write(span_service_pb2.AppendSpansRequest(chunks=chunks))
                in_flight += 1
            else:
                accepted += (await stream.read()).accepted_count * SPANS_PER_CHUNK
                in_flight -= 1
        await stream.done_writing()

    bench.raw["span_bytes_compressed"] = round(len(payloads[0]) / SPANS_PER_CHUNK)
    await asyncio.gather(*(write(position) for position in range(4)))
    return accepted


async def run(bench: Bench) -> None:
    """Runs all measurements."""
    seconds, repeats = (2.0, 1) if bench.short else (5.0, 3)
    await cycles(bench, producers=4, per_request=64, seconds=1.0)
    for name, producers, per_request, goal in (
        ("durable rollout cycles, 64 per request", 8, 64, 15_000),
        ("durable rollout cycles, one per request", 32, 1, 3_000),
    ):
        rates = []
        for _ in range(repeats):
            work = partial(cycles, bench, producers=producers, per_request=per_request, seconds=seconds)
            count, took = await measured(bench, name, work)
            rates.append(count / took)
        bench.raw[name]["rates"] = [round(rate, 1) for rate in rates]
        bench.claim(name, statistics.median(rates), "rollouts/s", goal, "higher")
    latencies = sorted(await dispatch_latency(bench, 200 if bench.short else 1000))
    bench.raw["dispatch latency"] = {"samples": len(latencies), "max_ms": round(latencies[-1], 2)}
    bench.claim("dispatch latency p50, idle queue", latencies[len(latencies) // 2], "ms", 5, "lower")
    bench.claim("dispatch latency p99, idle queue", latencies[len(latencies) * 99 // 100], "ms", 50, "lower")
    rates = []
    for _ in range(repeats):
        count, took = await measured(bench, "spans", partial(span_ingest, bench, seconds))
        rates.append(count / took)
    bench.raw["spans"]["rates"] = [round(rate, 1) for rate in rates]
    bench.claim(f"spans, {SPANS_PER_CHUNK} per chunk", statistics.median(rates), "spans/s", 150_000, "higher")


async def with_store(folder: Path, *, short: bool) -> dict[str, Any]:
    """Starts PostgreSQL and a store, measures, and stops both."""
    postgres = EmbeddedPostgres(folder / "data", settings={"shared_buffers": "256MB", "max_wal_size": "4GB"})
    dsn = postgres.start()
    key, ready = secrets.token_urlsafe(32), folder / "ready.json"
    environment = os.environ | {
        "FULMEN_STORE_DATABASE_URL": dsn,
        "FULMEN_STORE_PORT": "0",
        "FULMEN_STORE_METRICS_PORT": "0",
        "FULMEN_STORE_SIGNING_KEY": key,
        "FULMEN_STORE_READY_FILE": str(ready),
        "FULMEN_STORE_LOG_LEVEL": "warning",
    }
    store = await asyncio.create_subprocess_exec(sys.executable, "-m", "fulmen_store", "serve", env=environment)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists():  # a file of another process
                await asyncio.sleep(0.05)
        token = TokenSigner(key).issue(Role.ADMIN, subject="bench", ttl_s=3600)
        async with open_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}", token=token) as channel:
            bench = Bench(channel=channel, store_pid=store.pid, postgres_folder=folder / "data", short=short)
            await run(bench)
    finally:
        store.terminate()
        await store.wait()
        postgres.stop()
    return bench


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description="Measures the store.")
    parser.add_argument("--short", action="store_true", default=bool(os.environ.get("SHORT")))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        Path(folder).chmod(0o755)
        bench = uvloop.run(with_store(Path(folder), short=arguments.short))
    outcome.write("store", method=__doc__ or "", raw=bench.raw, claims=bench.claims)


if __name__ == "__main__":
    main()
