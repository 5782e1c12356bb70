"""Functions and blocks as spans: they behave as before."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fulmen import operation
from fulmen.agent import acting_agent


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name.rpartition(".")[2]: span for span in spans.get_finished_spans()}


@operation
def add(a: int, b: int = 2) -> int:
    """Adds."""
    return a + b


@operation("think", agent="planner", attributes={"depth": 3})
async def think(question: str) -> str:
    await asyncio.sleep(0)
    add(1)
    return f"{acting_agent()}: {question}"


@operation(record_arguments=False, record_result=False)
def quiet(password: str) -> str:
    return password


class Tool:
    @operation
    def use(self, query: str) -> list[str]:
        return [query]


async def test_arguments_and_results_are_in_the_span_unless_they_are_not_to_be(spans: InMemorySpanExporter) -> None:
    assert add(1) == 3
    assert quiet("hush") == "hush"
    assert Tool().use("weather") == ["weather"]
    found = by_name(spans)
    assert found["add"].attributes["fulmen.operation.arguments"] == '{"a": 1}'
    assert found["add"].attributes["fulmen.operation.result"] == "3"
    assert found["add"].attributes["code.function.name"].endswith("test_operations.add")
    assert "hush" not in str(dict(found["quiet"].attributes))
    assert found["use"].attributes["fulmen.operation.arguments"] == '{"query": "weather"}'


async def test_operations_nest_and_name_their_agent(spans: InMemorySpanExporter) -> None:
    assert await think("why?") == "planner: why?"
    assert acting_agent() == ""
    found = by_name(spans)
    assert found["add"].parent.span_id == found["think"].context.span_id
    assert found["think"].attributes["gen_ai.agent.name"] == "planner"
    assert found["think"].attributes["depth"] == 3


async def test_concurrent_calls_of_one_operation_keep_apart(spans: InMemorySpanExporter) -> None:
    await asyncio.gather(*(think(str(number)) for number in range(20)))
    thoughts = {span.context.span_id for span in spans.get_finished_spans() if span.name == "think"}
    parents = [span.parent.span_id for span in spans.get_finished_spans() if span.name.endswith("add")]
    assert len(thoughts) == 20
    assert sorted(parents) == sorted(thoughts)


def test_kinds_of_functions_stay_what_they_are() -> None:
    assert inspect.iscoroutinefunction(think)
    assert not inspect.iscoroutinefunction(add)
    assert inspect.isgeneratorfunction(operation(count))
    assert inspect.isasyncgenfunction(operation(count_slowly))
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert list(inspect.signature(add).parameters) == ["a", "b"]


async def test_exceptions_go_on_and_are_recorded(spans: InMemorySpanExporter) -> None:
    @operation
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        await fail()
    with pytest.raises(KeyError), operation("block"):
        raise KeyError("x")
    for span in spans.get_finished_spans():
        assert span.status.status_code is trace.StatusCode.ERROR
        assert len(span.events) == 1


def count(limit: int) -> Iterator[int]:
    for number in range(limit):
        with operation("inside"):
            yield number
    return "done"


async def count_slowly(limit: int) -> AsyncIterator[int]:
    for number in range(limit):
        await asyncio.sleep(0)
        add(number)
        yield number


def test_the_consumer_of_a_generator_is_not_inside_it(spans: InMemorySpanExporter) -> None:
    before = trace.get_current_span()

    @operation
    def numbers() -> Iterator[int]:
        add(0)
        yield 1
        add(1)
        yield 2
        return 3

    for _ in numbers():
        assert trace.get_current_span() is before
    spans_of = by_name(spans)
    assert spans_of["numbers"].attributes["fulmen.operation.items"] == 2
    assert spans_of["numbers"].attributes["fulmen.operation.result"] == "3"
    assert spans_of["add"].parent.span_id == spans_of["numbers"].context.span_id


def test_what_is_sent_and_thrown_into_a_generator_arrives(spans: InMemorySpanExporter) -> None:
    closed = []

    @operation
    def echo() -> Iterator[object]:
        got = None
        try:
            while True:
                try:
                    got = yield got
                except ValueError as error:
                    got = str(error)
        finally:
            closed.append(True)

    generator = echo()
    assert next(generator) is None
    assert generator.send(5) == 5
    assert generator.throw(ValueError("thrown")) == "thrown"
    generator.close()
    assert closed == [True]
    [span] = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.UNSET


async def test_async_generators_are_operations_too(spans: InMemorySpanExporter) -> None:
    assert [number async for number in operation(count_slowly)(3)] == [0, 1, 2]
    closed = operation("closed")(count_slowly)(3)
    assert await anext(closed) == 0
    await closed.aclose()
    found = by_name(spans)
    assert found["count_slowly"].attributes["fulmen.operation.items"] == 3
    assert found["closed"].attributes["fulmen.operation.items"] == 1
    assert found["closed"].status.status_code is trace.StatusCode.UNSET


async def test_a_block_tells_its_result(spans: InMemorySpanExporter) -> None:
    async with operation("look") as look:
        look.set_arguments({"where": "here"})
        look.set_result({"found": 1})
        look.set_attribute("hits", 2)
    [span] = spans.get_finished_spans()
    assert dict(span.attributes) == {
        "fulmen.operation.name": "look",
        "fulmen.operation.arguments": '{"where": "here"}',
        "fulmen.operation.result": '{"found": 1}',
        "hits": 2,
    }
    assert span.context.span_id.to_bytes(8, "big") == look.span_id


def test_one_block_is_not_opened_twice() -> None:
    block = operation("once")
    with block, pytest.raises(RuntimeError, match="already open"), block:
        pass
