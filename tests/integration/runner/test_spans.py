"""OpenTelemetry spans of agents reach the store before their attempt ends."""

from __future__ import annotations

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import trace_id_of
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

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
LONG = """
from opentelemetry import trace
def solve(task):
    with trace.get_tracer("an-agent").start_as_current_span("long conversation") as span:
        for number in range(1000):
            span.set_attribute(f"llm.input_messages.{number}.message.content", "hello")
    return 1.0
"""
HANDED_ON = """
import asyncio
from opentelemetry import context, trace
tracer = trace.get_tracer("an-agent")
work = asyncio.Queue()
workers = []
async def serve():
    while True:
        parent, done = await work.get()
        tracer.start_span("served", context=parent).end()
        done.set()
async def solve(task):
    if not workers:
        workers.append(asyncio.create_task(serve()))  # Goes on in the context of the attempt that began it.
    with tracer.start_as_current_span("asked"):
        done = asyncio.Event()
        work.put_nowait((context.get_current(), done))
        await done.wait()
    return 1.0
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


async def test_spans_of_many_in_process_agents_belong_to_their_attempts(world: World) -> None:
    agent = await world.publish({"agent.py": IN_PROCESS}, python="agent.py:solve")
    await world.start()
    names = await world.store.create(rollouts_of(agent, [{}] * 20))
    await world.store.ended(names)
    found = sorted((attempt_of(span), span.name) for span in world.double.otlp_spans)
    assert found == sorted((f"{name}/attempts/1", span) for name in names for span in ("inner", "outer"))
    for span in world.double.otlp_spans:
        assert span.trace_id.hex() == trace_id_of(attempt_of(span))
        assert span.parent_span_id


async def test_a_span_with_more_attributes_than_opentelemetry_keeps_by_default_is_whole(world: World) -> None:
    agent = await world.publish({"agent.py": LONG}, python="agent.py:solve")
    await world.start()
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    await world.store.ended([name])
    [span] = world.double.otlp_spans
    assert (attempt_of(span), span.dropped_attributes_count) == (f"{name}/attempts/1", 0)
    assert len(span.attributes) > 1000


async def test_a_task_that_works_for_many_attempts_makes_spans_of_those_that_asked_it(world: World) -> None:
    agent = await world.publish({"agent.py": HANDED_ON}, python="agent.py:solve")
    await world.start()
    names = await world.store.create(rollouts_of(agent, [{}] * 10))
    await world.store.ended(names)
    found = sorted((attempt_of(span), span.name) for span in world.double.otlp_spans)
    assert found == sorted((f"{name}/attempts/1", span) for name in names for span in ("asked", "served"))


async def test_an_ordinary_exporter_in_a_command_needs_no_settings(world: World) -> None:
    agent = await world.publish({"agent.py": COMMAND}, command=("python", "agent.py"))
    await world.start()
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    [ended] = (await world.store.ended([name]))[name]
    assert (ended.message, ended.kind) == ("", "")
    assert [span.name for span in world.double.otlp_spans] == ["alone"]
