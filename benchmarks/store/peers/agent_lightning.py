"""The same life of a rollout with Agent Lightning 0.3.0's HTTP store; runs inside its own virtual environment.

`python agent_lightning.py URL MODE RUNNERS SECONDS` prints one JSON object. Enqueue, dequeue, ten spans of 1 kB, mark
the attempt as succeeded. MODE `sdk`: spans by its client's `add_many_spans`. MODE `otlp`: its faster way, one OTLP
request per rollout. It keeps everything in memory: nothing is durable.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time

import aiohttp
from agentlightning import Span
from agentlightning.store import LightningStoreClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

TEXTS = [secrets.token_hex(55) for _ in range(4096)]


def attributes() -> dict[str, str]:
    """Makes about 1 kB of attributes."""
    return {f"gen_ai.attribute.{key}": TEXTS[secrets.randbelow(len(TEXTS))] for key in range(8)}


def sdk_spans(rollout_id: str, attempt_id: str) -> list[Span]:
    """Makes ten spans as its client wants them."""
    now = time.time()
    return [
        Span.from_attributes(
            attributes=attributes(),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=number,
            name="chat tiny-model",
            start_time=now,
            end_time=now + 0.001,
        )
        for number in range(1, 11)
    ]


def otlp_body(rollout_id: str, attempt_id: str) -> bytes:
    """Makes one OTLP request with ten spans."""
    resource = Resource(
        attributes=[
            KeyValue(key="agentlightning.rollout_id", value=AnyValue(string_value=rollout_id)),
            KeyValue(key="agentlightning.attempt_id", value=AnyValue(string_value=attempt_id)),
        ]
    )
    spans = []
    for _ in range(10):
        now = time.time_ns()
        span = trace_pb2.Span(
            name="chat tiny-model",
            trace_id=secrets.token_bytes(16),
            span_id=secrets.token_bytes(8),
            start_time_unix_nano=now,
            end_time_unix_nano=now + 1_000_000,
        )
        for key, value in attributes().items():
            span.attributes.add(key=key, value=AnyValue(string_value=value))
        spans.append(span)
    scoped = trace_pb2.ScopeSpans(spans=spans)
    request = ExportTraceServiceRequest(
        resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scoped])]
    )
    return request.SerializeToString()


async def run(url: str, mode: str, runners: int, seconds: float) -> int:
    """Runs lives of rollouts for so long; returns how many ended."""
    store = LightningStoreClient(url)
    deadline, finished = time.perf_counter() + seconds, 0

    async def live(session: aiohttp.ClientSession) -> None:
        nonlocal finished
        while time.perf_counter() < deadline:
            await store.enqueue_rollout(input={"question": "What is 17 + 25?", "pad": "x" * 300})
            work = await store.dequeue_rollout()
            if work is None:
                continue
            rollout_id, attempt_id = work.rollout_id, work.attempt.attempt_id
            if mode == "sdk":
                await store.add_many_spans(sdk_spans(rollout_id, attempt_id))
            else:
                headers = {"content-type": "application/x-protobuf"}
                body = otlp_body(rollout_id, attempt_id)
                async with session.post(f"{url}/v1/traces", data=body, headers=headers) as answer:
                    answer.raise_for_status()
            await store.update_attempt(rollout_id, attempt_id, status="succeeded")
            finished += 1

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(live(session) for _ in range(runners)))
    await store.close()
    return finished


if __name__ == "__main__":
    started, cpu = time.perf_counter(), time.process_time()
    count = asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
    measured = {
        "finished": count,
        "seconds": time.perf_counter() - started,
        "client_cpu_s": time.process_time() - cpu,
    }
    sys.stdout.write(json.dumps(measured) + "\n")
