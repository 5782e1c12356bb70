"""Durable rollout cycles, with and without spans, and the latency of dispatch.

Every rollout is created, committed, pushed over a lease stream, completed, committed and acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.store.spans import ten_spans
from benchmarks.store.stand import START_LIMIT_S, Bench, measured
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import (
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    span_service_pb2,
    span_service_pb2_grpc,
)

INPUT = b'{"question": "What is 17 + 25?", "pad": "' + b"x" * 300 + b'"}'
RUNNERS = 4
SLOTS = 512
MAX_AHEAD = 20_000
SESSIONS = 1000

_request = lease_service_pb2.StreamLeasesRequest
Report = Callable[[Sequence[lease_pb2.Assignment]], Any]


async def open_stream(channel: FulmenChannel, *, credit_count: int) -> Any:
    """Opens a runner session with credit."""
    stream = lease_service_pb2_grpc.LeaseServiceStub(channel).StreamLeases()
    await stream.write(_request(open=lease_service_pb2.OpenSession(info=lease_pb2.RunnerInfo(host="bench"))))
    while (await stream.read()).WhichOneof("message") != "opened":
        pass
    if credit_count:
        await stream.write(_request(add_credits=lease_service_pb2.AddCredits(credit_count=credit_count)))
    return stream


async def complete(stream: Any, assignments: Sequence[lease_pb2.Assignment], *, credit_count: int) -> None:
    """Reports assignments as done and gives their credit back."""
    results = [
        lease_pb2.AttemptResult(attempt=one.attempt, lease_id=one.lease_id, epoch=one.epoch, rewards=[{"value": 1.0}])
        for one in assignments
    ]
    await stream.write(
        _request(complete=lease_service_pb2.CompletedAttempts(results=results, credit_count=credit_count))
    )


async def runner(channel: FulmenChannel, done: Callable[[int], None], stop: asyncio.Event, *, spans: bool) -> None:
    """Completes whatever it is given, until told to stop; with spans, after they are durable."""
    stream = await open_stream(channel, credit_count=SLOTS)
    writer = span_service_pb2_grpc.SpanServiceStub(channel).AppendSpans() if spans else None
    while not stop.is_set():
        message = await stream.read()
        kind = message.WhichOneof("message")
        if kind == "assign":
            assignments = message.assign.assignments
            if writer is not None:
                chunks = [ten_spans(one.attempt) for one in assignments]
                await writer.write(span_service_pb2.AppendSpansRequest(chunks=chunks))
                assert (await writer.read()).accepted_count == len(chunks)
            await complete(stream, assignments, credit_count=len(assignments))
        elif kind == "ack":
            done(len(message.ack.acks))


async def cycles(
    bench: Bench, *, producers: int, per_request: int, seconds: float, streams: bool = False, spans: bool = False
) -> int:
    """Creates and completes rollouts for so long; returns how many went the whole way.

    Each producer waits for the answer to a request before it sends the next one, by a call each or over a stream.
    """
    finished, created, stop, moved = 0, 0, asyncio.Event(), asyncio.Event()
    stubs = [rollout_service_pb2_grpc.RolloutServiceStub(channel) for channel in bench.channels]
    deadline = time.perf_counter() + seconds

    def done(count: int) -> None:
        nonlocal finished
        finished += count
        moved.set()

    async def produce(number: int) -> None:
        nonlocal created
        stub = stubs[number % len(stubs)]
        stream = stub.StreamCreateRollouts() if streams else None
        while time.perf_counter() < deadline:
            rollouts = [rollout_pb2.Rollout(input=INPUT) for _ in range(per_request)]
            if stream is None:
                await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
            else:
                await stream.write(rollout_service_pb2.StreamCreateRolloutsRequest(rollouts=rollouts))
                await stream.read()
            created += per_request
            while created - finished > MAX_AHEAD:
                moved.clear()
                await moved.wait()

    runners = [
        asyncio.create_task(runner(bench.channels[number % len(stubs)], done, stop, spans=spans))
        for number in range(RUNNERS)
    ]
    await asyncio.gather(*(produce(number) for number in range(producers)))
    async with asyncio.timeout(START_LIMIT_S):
        while finished < created:
            moved.clear()
            await moved.wait()
    stop.set()
    for task in runners:
        task.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
    return finished


async def dispatch_latency(bench: Bench, *, sessions: int, count: int) -> list[float]:
    """Measures from the call of create to the assignment at a runner, on an idle queue, in milliseconds.

    So many runner sessions are connected, each with one credit; rollouts come one at a time.
    """
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    assigned: asyncio.Queue[tuple[float, Any, Sequence[lease_pb2.Assignment]]] = asyncio.Queue()

    async def sit(stream: Any) -> None:
        while True:
            message = await stream.read()
            if message.WhichOneof("message") == "assign":
                assigned.put_nowait((time.perf_counter(), stream, message.assign.assignments))

    streams = []
    for start in range(0, sessions, 50):
        some = range(min(50, sessions - start))
        streams += await asyncio.gather(*(open_stream(bench.channel, credit_count=1) for _ in some))
    streams = [asyncio.create_task(sit(stream)) for stream in streams]
    latencies = []
    for _ in range(count):
        # Rollouts do not come in step with anything of the store's.
        await asyncio.sleep(random.uniform(0, 0.002))
        started = time.perf_counter()
        message = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=INPUT)])
        creating = asyncio.create_task(stub.BatchCreateRollouts(message))
        arrived, stream, assignments = await assigned.get()
        latencies.append((arrived - started) * 1000)
        await creating
        await complete(stream, assignments, credit_count=1)
    for stream, stream in zip(streams, streams, strict=True):
        stream.cancel()
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return sorted(latencies)


LOADS: Sequence[tuple[str, dict[str, Any], float]] = (
    ("durable rollout cycles, 64 per request", {"producers": 8, "per_request": 64}, 15_000),
    ("durable rollout cycles, one per request over 64 streams", {"producers": 64, "streams": True}, 3_000),
    ("durable rollout cycles, one per call of 64 clients", {"producers": 64}, 3_000),
    ("durable rollout cycles with ten 1 kB spans each", {"producers": 8, "per_request": 64, "spans": True}, 3_000),
)


async def throughput(bench: Bench) -> None:
    """Measures the loads one after the other."""
    seconds, repeats = (2.0, 1) if bench.short else (5.0, 3)
    replicas = "" if len(bench.channels) == 1 else f" ({len(bench.channels)} replicas)"
    await cycles(bench, producers=4, per_request=64, seconds=1.0)
    for title, load, goal in LOADS:
        name, rates = f"{title}{replicas}", []
        for _ in range(repeats):
            work = partial(cycles, bench, seconds=seconds, **({"per_request": 1} | load))
            count, took = await measured(bench, name, work)
            rates.append(count / took)
        bench.raw[name]["rates"] = [round(rate, 1) for rate in rates]
        bench.claim(name, statistics.median(rates), "rollouts/s", goal, "higher")


async def run(bench: Bench) -> None:
    """Runs the measurements of rollouts."""
    await throughput(bench)
    for sessions in (1, 100 if bench.short else SESSIONS):
        latencies = await dispatch_latency(bench, sessions=sessions, count=200 if bench.short else 1000)
        p50, p99 = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
        title = f"dispatch latency, idle queue, {sessions} runner sessions"
        bench.raw[title] = {"samples": len(latencies), "max_ms": round(latencies[-1], 2)}
        bench.claim(f"{title}, p50", p50, "ms", 5, "lower")
        bench.claim(f"{title}, p99", p99, "ms", 50, "lower")
