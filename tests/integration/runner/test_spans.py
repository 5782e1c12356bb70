"""OpenTelemetry spans of agents reach the store before their attempt ends."""

from __future__ import annotations

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.conformance.runner.fixtures import PublishAgent, StartRunner
from tests.conformance.runner.harness import rollouts_of
from tests.conformance.runner.stores import DoubleStore

IN_PROCESS = """
import asyncio
from opentelemetry import trace
tracer = trace.get_tracer("an-agent")
async def solve(task):
    with tracer.start_as_current_span("outer"):
        await asyncio.sleep(0)
        await asyncio.to_thread(work)
    return 1.0
def work():
    with tracer.start_as_current_span("inner"):
        pass
"""
COMMAND = """
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
with provider.get_tracer("an-agent").start_as_current_span("alone"):
    pass
provider.shutdown()
print(1)
"""


def attempt_of(span: Span) -> str:
    attributes = {attribute.key: attribute.value for attribute in span.attributes}
    return f"{attributes['fulmen.rollout'].string_value}/attempts/{attributes['fulmen.attempt'].int_value}"


async def test_spans_of_many_in_process_agents_belong_to_their_attempts(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent({"agent.py": IN_PROCESS}, python="agent.py:solve")
    await start_runner()
    names = await store.create(rollouts_of(agent, [{}] * 20))
    await store.ended(names)
    found = sorted((attempt_of(span), span.name) for span in store.double.otlp_spans)
    assert found == sorted((f"{name}/attempts/1", span) for name in names for span in ("inner", "outer"))
    for span in store.double.otlp_spans:
        assert span.trace_id.hex() == attempt_of(span).split("/")[1].replace("-", "")
        assert span.parent_span_id


async def test_an_ordinary_exporter_in_a_command_needs_no_settings(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent({"agent.py": COMMAND}, command=("python", "agent.py"))
    await start_runner()
    [name] = await store.create(rollouts_of(agent, [{}]))
    [ended] = (await store.ended([name]))[name]
    assert (ended.message, ended.kind) == ("", "")
    assert [span.name for span in store.double.otlp_spans] == ["alone"]
