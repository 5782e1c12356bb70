"""What a model call costs in the LLM proxy: CPU of its process per call, and the latency that it adds.

A canned backend answers at once (1,024 prompt ids, 256 token ids with log-probabilities: about 37 kB) or streams 64
token events, all at once or paced; a client keeps a fixed number of calls in flight. CPU time is that of the proxy's
process alone (user + system), with capture, attribution, routing, limits, metrics and delivery to a store on. On a
shared machine CPU per call is steady and wall time is not: read that first.

Run `python -m benchmarks.proxy [--short]`; writes benchmarks/results/proxy.json.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import psutil
import uvloop

from benchmarks import outcome
from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.llm_proxy.v1 import (
    backend_pb2,
    backend_service_pb2,
    backend_service_pb2_grpc,
    capture_service_pb2,
    capture_service_pb2_grpc,
    route_pb2,
    route_service_pb2,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import open_channel
from fulmen_service_kit.tokens import Role, TokenSigner
from tests.integration.llm_proxy.fake_store import FakeStore

SIGNING_KEY = "benchmark-signing-key-of-at-least-32-bytes"
PROMPT_TOKENS, COMPLETION_TOKENS, STREAM_EVENTS = 1024, 256, 64
PACE_S = 0.01
GOAL_CPU_US = 400.0
GOAL_STREAM_CPU_US = 2454.0
GOAL_ADDED_MS = 1.0
GOAL_FIRST_TOKEN_MS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of load.

    Attributes:
        captured: the caller is an agent on a trainable route; else a client whose calls only pass.
    """

    name: str
    stream: bool
    paced: bool
    captured: bool
    concurrency: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run of a case gave; times of calls in milliseconds."""

    case: str
    via: str
    calls: int
    seconds: float
    cpu_us_per_call: float | None
    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float


def canned_answer() -> bytes:
    """Returns a whole RL-sized answer."""
    content = [
        {"token": " tok", "logprob": -0.123456789 - i / 1000, "bytes": [32, 116, 111, 107], "top_logprobs": []}
        for i in range(COMPLETION_TOKENS)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " tok" * COMPLETION_TOKENS},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": [100_000 + i for i in range(COMPLETION_TOKENS)],
    }
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "canned",
        "choices": [choice],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS, "total_tokens": 1280},
        "prompt_token_ids": [50_000 + i for i in range(PROMPT_TOKENS)],
    }
    return json.dumps(answer).encode()


def canned_events() -> list[bytes]:
    """Returns the events of a stream: a first one with the prompt, the tokens, the end, the usage."""
    envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "canned"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    documents = [{**envelope, "choices": [first], "prompt_token_ids": [50_000 + i for i in range(PROMPT_TOKENS)]}]
    for i in range(STREAM_EVENTS):
        logprobs = {"content": [{"token": " tok", "logprob": -0.5 - i / 100, "bytes": [32], "top_logprobs": []}]}
        choice = {"index": 0, "delta": {"content": " tok"}, "logprobs": logprobs, "token_ids": [100_000 + i]}
        documents.append({**envelope, "choices": [{**choice, "finish_reason": None}]})
    documents.append({**envelope, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": STREAM_EVENTS}
    documents.append({**envelope, "choices": [], "usage": usage})
    return [b"data: " + json.dumps(d).encode() + b"\n\n" for d in documents] + [b"data: [DONE]\n\n"]


class CannedBackend(asyncio.Protocol):
    """Answers HTTP as cheaply as Python can, so that the backend is not what is measured."""

    whole = b""
    events: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the connection."""
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        """Answers each complete request."""
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.received = body[length:]
        if b'"stream":true' not in body:
            self.transport.write(self.whole)
        elif b'"paced":true' in body:
            self.task = asyncio.create_task(self._pace())
        else:
            self.transport.write(b"".join(self.events))

    async def _pace(self) -> None:
        for event in self.events:
            self.transport.write(event)
            await asyncio.sleep(PACE_S)


async def serve_backend() -> None:
    """Runs the canned backend as a process of its own; prints its port."""
    body = canned_answer()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    CannedBackend.whole = head % len(body) + body
    stream_head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in canned_events()]
    CannedBackend.events = (stream_head + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n")
    server = await asyncio.get_running_loop().create_server(CannedBackend, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@asynccontextmanager
async def backend_process() -> AsyncIterator[str]:
    """Yields the base URL of a canned backend."""
    command = [sys.executable, "-m", "benchmarks.proxy", "--serve-backend"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def proxy_process(store_target: str, signer: TokenSigner) -> AsyncIterator[tuple[psutil.Process, dict[str, int]]]:
    """Yields a proxy's process and its ports."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        environment = os.environ | {
            "FULMEN_LLM_PROXY_SIGNING_KEY": SIGNING_KEY,
            "FULMEN_LLM_PROXY_TOKEN": signer.issue(Role.SERVICE, subject="llm_proxy", ttl_s=3600),
            "FULMEN_LLM_PROXY_STORE_TARGET": store_target,
            "FULMEN_LLM_PROXY_PORT": "0",
            "FULMEN_LLM_PROXY_HTTP_PORT": "0",
            "FULMEN_LLM_PROXY_READY_FILE": str(ready),
            "FULMEN_LLM_PROXY_LOG_LEVEL": "warning",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fulmen_llm_proxy", "serve", env=environment
        )
        try:
            async with asyncio.timeout(30):
                while not ready.exists():
                    await asyncio.sleep(0.05)
            yield psutil.Process(process.pid), json.loads(ready.read_text())
        finally:
            process.terminate()
            await process.wait()


async def set_up(channel, backend_url: str) -> None:
    """Registers the backend and a trainable route to it."""
    backend = backend_pb2.Backend(name="backends/canned", base_url=backend_url, returns_token_ids=True)
    register = backend_service_pb2.RegisterBackendRequest(backend=backend)
    await backend_service_pb2_grpc.BackendServiceStub(channel).RegisterBackend(register)
    target = route_pb2.RouteTarget(backend="backends/canned", weight=1, policy="p", policy_version=1)
    route = route_pb2.Route(name="routes/canned", targets=[target])
    await route_service_pb2_grpc.RouteServiceStub(channel).PutRoute(route_service_pb2.PutRouteRequest(route=route))


async def load(case: Case, url: str, key: str) -> tuple[list[float], list[float], float]:
    """Makes the calls of a case; returns the seconds to the end and to the first byte of each, and in all."""
    body = {"model": "canned", "messages": [{"role": "user", "content": "x" * 200}], "paced": case.paced}
    data = json.dumps(body | {"stream": case.stream}, separators=(",", ":")).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    ends: list[float] = []
    firsts: list[float] = []
    left = case.calls

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def agent() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = time.perf_counter()
                async with session.post(f"{url}/chat/completions", data=data, headers=headers) as answer:
                    await answer.content.readany()
                    firsts.append(time.perf_counter() - began)
                    await answer.content.read()
                    if answer.status != 200:
                        raise RuntimeError(f"status {answer.status}")
                ends.append(time.perf_counter() - began)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(case.concurrency):
                group.create_task(agent())
        return ends, firsts, time.perf_counter() - began


def figures(case: Case, via: str, measured: tuple[list[float], list[float], float], cpu_s: float | None) -> Figures:
    """Sums up one run."""
    ends, firsts, seconds = measured
    ordered = sorted(ends)
    return Figures(
        case=case.name,
        via=via,
        calls=len(ends),
        seconds=round(seconds, 3),
        cpu_us_per_call=None if cpu_s is None else round(cpu_s / len(ends) * 1e6, 1),
        p50_ms=round(statistics.median(ends) * 1e3, 3),
        p99_ms=round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        first_byte_p50_ms=round(statistics.median(firsts) * 1e3, 3),
    )


async def measure(cases: list[Case], rounds: int) -> tuple[list[Figures], float, int]:
    """Runs every case directly and through the proxy, in turn; returns the figures and the proxy's memory."""
    signer = TokenSigner(SIGNING_KEY)
    client_key = signer.issue(Role.CLIENT, subject="benchmark", ttl_s=3600)
    results: list[Figures] = []
    flushed = 0
    async with (
        FakeStore() as store,
        backend_process() as backend_url,
        proxy_process(store.target, signer) as (process, ports),
        open_channel(f"127.0.0.1:{ports['port']}", token=_service(signer)) as channel,
    ):
        await set_up(channel, backend_url)
        url = f"http://127.0.0.1:{ports['http_port']}/v1"
        captures = capture_service_pb2_grpc.CaptureServiceStub(channel)
        for number in range(rounds + 1):
            for case in cases:
                attempt = AttemptName(rollout_id=uuid7(), number=1)
                key = client_key
                if case.captured:
                    key = signer.attempt_key(
                        attempt, project=DEFAULT_PROJECT, lease_id="l", epoch=1, mode="train", ttl_s=3600
                    )
                before = process.cpu_times()
                measured = await load(case, url, key)
                # The cost of a capture includes its delivery.
                request = capture_service_pb2.FlushCapturesRequest(attempts=[str(attempt)])
                answer = await captures.FlushCaptures(request, timeout=60)
                after = process.cpu_times()
                [summary] = answer.summaries
                if summary.unusable_count or not summary.flushed:
                    raise RuntimeError("a capture was not usable or not delivered")
                flushed += summary.call_count
                store.chunks.clear()
                if number == 0:
                    continue  # the first round warms up
                cpu_s = after.user + after.system - before.user - before.system
                results.append(figures(case, "proxy", measured, cpu_s))
                direct = await load(case, backend_url, key)
                results.append(figures(case, "direct", direct, None))
        return results, process.memory_full_info().pss / 1e6, flushed


def _service(signer: TokenSigner) -> str:
    return signer.issue(Role.SERVICE, subject="benchmark", ttl_s=3600)


def median_of(results: list[Figures], case: str, via: str, field: str) -> float:
    """Returns the median of a figure over the rounds."""
    return statistics.median(getattr(r, field) for r in results if r.case == case and r.via == via)


def claims_of(results: list[Figures]) -> list[outcome.Claim]:
    """Returns the claims with their goals, whether they hold or not."""

    def claim(name: str, value: float, unit: str, goal: float) -> outcome.Claim:
        return outcome.claim(name, value, unit, goal=goal, better="lower")

    def cpu(case: str) -> float:
        return median_of(results, case, "proxy", "cpu_us_per_call")

    def added(case: str, field: str) -> float:
        return median_of(results, case, "proxy", field) - median_of(results, case, "direct", field)

    return [
        claim("CPU per captured RL-sized call, 16 concurrent", cpu("whole_captured_c16"), "us", GOAL_CPU_US),
        claim("CPU per captured paced stream, 64 concurrent", cpu("paced_captured_c64"), "us", GOAL_STREAM_CPU_US),
        claim(
            "latency added to a captured call, 1 concurrent, p50",
            added("whole_captured_c1", "p50_ms"),
            "ms",
            GOAL_ADDED_MS,
        ),
        claim(
            "first token delayed, paced streams, 64 concurrent, p50",
            added("paced_captured_c64", "first_byte_p50_ms"),
            "ms",
            GOAL_FIRST_TOKEN_MS,
        ),
    ]


def cases_of(scale: float) -> list[Case]:
    """Returns the cases, each with its share of calls."""

    def case(
        name: str, calls: int, concurrency: int, *, stream: bool = False, paced: bool = False, captured: bool = True
    ) -> Case:
        return Case(
            name=name,
            stream=stream,
            paced=paced,
            captured=captured,
            concurrency=concurrency,
            calls=max(concurrency, int(calls * scale)),
        )

    return [
        case("whole_passed_c16", 3000, 16, captured=False),
        case("whole_captured_c1", 600, 1),
        case("whole_captured_c16", 3000, 16),
        case("burst_captured_c16", 1000, 16, stream=True),
        case("paced_passed_c64", 256, 64, stream=True, paced=True, captured=False),
        case("paced_captured_c64", 256, 64, stream=True, paced=True),
    ]


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--serve-backend", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_backend:
        uvloop.run(serve_backend())
        return
    rounds, scale = (1, 0.3) if arguments.short else (3, 1.0)
    results, memory_mb, flushed = uvloop.run(measure(cases_of(scale), rounds))
    for result in results:
        sys.stdout.write(
            f"{result.case:20} {result.via:7} {result.cpu_us_per_call or '':>8} us  p50 {result.p50_ms} ms  "
            f"first byte {result.first_byte_p50_ms} ms\n"
        )
    outcome.write(
        "proxy",
        method=(__doc__ or "").split("\n\n")[1],
        raw=[asdict(result) for result in results],
        claims=claims_of(results),
        rounds=rounds,
        captured_calls=flushed,
        memory_pss_mb=round(memory_mb, 1),
    )


if __name__ == "__main__":
    main()
