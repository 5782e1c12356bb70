"""Many runners in one process: `python -m benchmarks.scale.fleet` reads its plan as JSON from standard input.

Each runner is what the store sees of a real one: a connection of its own, a lease stream, credits, renewals, spans, results. Its
agent is a stand-in: it thinks, asks a model once through the proxy with the attempt's key, thinks, and ends with a reward.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import uvloop

from benchmarks.store.spans import ten_spans
from fulmen.store.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc, span_service_pb2
from fulmen.store.v1.span_service_pb2_grpc import SpanServiceStub

OPENING_AT_ONCE = 100
CALL = {"model": "canned", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
# As a runner's own channel, but never shared with that of another runner.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 20_000))

_request = lease_service_pb2.StreamLeasesRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet does.

    Attributes:
        targets: the store's replicas; runners are spread over them.
        proxy: `host:port` of the proxy's HTTP port.
        token: of role `runner`. Secret.
        runners: how many, each with one slot.
        think_s: mean time that an agent thinks, seconds; exponential.
        seed: of the times.
    """

    targets: list[str]
    proxy: str
    token: str
    runners: int
    think_s: float
    seed: int


@dataclass(slots=True)
class Seen:
    """What the runners of a process went through; times in seconds."""

    empty_s: list[float] = field(default_factory=list)
    acknowledged_s: list[float] = field(default_factory=list)
    model_s: list[float] = field(default_factory=list)
    ended: int = 0
    not_applied: int = 0
    failed_calls: int = 0
    broken: list[str] = field(default_factory=list)


class Fleet:
    """The runners of one process."""

    def __init__(self, plan: Plan, http: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._http = http
        self._rng = random.Random(plan.seed)
        self._metadata = (("authorization", f"Bearer {plan.token}"),)
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)
        self._url = f"http://{plan.proxy}/v1/chat/completions"
        self.opened = 0
        self.stopping = asyncio.Event()
        self.seen = Seen()

    async def live(self, number: int) -> None:
        """Runs one runner until it is stopped."""
        target = self._plan.targets[number % len(self._plan.targets)]
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            try:
                async with self._opening:
                    stream = lease_service_pb2_grpc.LeaseServiceStub(channel).StreamLeases(metadata=self._metadata)
                    info = lease_pb2.RunnerInfo(host="scale", slot_count=1)
                    await stream.write(_request(open=lease_service_pb2.OpenSession(info=info)))
                    opened = (await stream.read()).opened
                    self.opened += 1
                spans = SpanServiceStub(channel).AppendSpans(metadata=self._metadata)
                ttl_s = opened.lease_ttl.seconds + opened.lease_ttl.nanos / 1e9
                writing = asyncio.Lock()  # gRPC takes one message of a stream at a time
                renewing = asyncio.create_task(self._renew(stream, writing, ttl_s / 3))
                try:
                    await self._work(stream, writing, spans)
                finally:
                    renewing.cancel()
                    stream.cancel()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                if not self.stopping.is_set():
                    code = type(error).__name__
                    if isinstance(error, grpc.aio.AioRpcError):
                        code = f"{error.code().name}: {error.details()}"
                    self.seen.broken.append(code)

    async def _work(self, stream: Any, writing: asyncio.Lock, spans: Any) -> None:
        await stream.write(_request(add_credits=lease_service_pb2.AddCredits(credit_count=1)))
        free_at, reported_at = time.perf_counter(), 0.0
        while not self.stopping.is_set():
            message = await stream.read()
            if message is grpc.aio.EOF:
                return
            kind = message.WhichOneof("message")
            if kind == "assign":
                (assignment,) = message.assign.assignments
                self.seen.empty_s.append(time.perf_counter() - free_at)
                await self._attempt(assignment, spans)
                free_at = reported_at = time.perf_counter()
                result = lease_pb2.AttemptResult(
                    attempt=assignment.attempt,
                    lease_id=assignment.lease_id,
                    epoch=assignment.epoch,
                    rewards=[{"value": 1}],
                )
                done = lease_service_pb2.CompletedAttempts(results=[result], credit_count=1)
                async with writing:
                    await stream.write(_request(complete=done))
            elif kind == "ack":
                self.seen.acknowledged_s.append(time.perf_counter() - reported_at)
                applied = [ack.status == lease_pb2.COMPLETION_STATUS_APPLIED for ack in message.ack.acks]
                self.seen.ended += sum(applied)
                self.seen.not_applied += applied.count(False)

    async def _attempt(self, assignment: lease_pb2.Assignment, spans: Any) -> None:
        think_s = self._rng.expovariate(1 / self._plan.think_s) if self._plan.think_s else 0.0
        await asyncio.sleep(think_s / 2)
        started = time.perf_counter()
        headers = {"authorization": f"Bearer {assignment.attempt_key}"}
        async with self._http.post(self._url, json=CALL, headers=headers) as answer:
            await answer.read()
            self.seen.failed_calls += answer.status != 200
        self.seen.model_s.append(time.perf_counter() - started)
        await asyncio.sleep(think_s / 2)
        await spans.write(span_service_pb2.AppendSpansRequest(chunks=[ten_spans(assignment.attempt)]))
        await spans.read()

    async def _renew(self, stream: Any, writing: asyncio.Lock, every_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, every_s))
        while True:
            async with writing:
                await stream.write(_request(renew=lease_service_pb2.RenewSession()))
            await asyncio.sleep(every_s)


async def run(plan: Plan) -> None:
    """Opens the runners, says `ready`, lets them work until standard input says `stop`, and prints what they saw.

    To `reset` it forgets what they saw so far, and to `count` it tells how many attempts have ended since.
    """
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
        fleet = Fleet(plan, http)
        tasks = [asyncio.create_task(fleet.live(number)) for number in range(plan.runners)]
        while fleet.opened + len(fleet.seen.broken) < plan.runners:  # counted by many
            await asyncio.sleep(0.1)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while (said := (await asyncio.to_thread(sys.stdin.readline)).strip()) != "stop":
            if said == "reset":
                fleet.seen = Seen(broken=fleet.seen.broken)
            sys.stdout.write(f"{fleet.seen.ended}\n")
            sys.stdout.flush()
        fleet.stopping.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    sys.stdout.write(json.dumps(asdict(fleet.seen)) + "\n")


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(run(Plan(**json.loads(sys.stdin.readline()))))
