"""Attempts that go on where a lost one was, at a whole proxy on real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import parse_attempt_name
from fulmen.model_call import REPLAYED_ATTRIBUTE
from fulmen.trajectories.calls import DropReason, drop_reasons
from fulmen.trajectories.reading import read_calls
from fulmen.trajectories.trajectory import trajectory
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.llm_proxy.backend import JSON, Backend, call_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def unequal_answers() -> Any:
    """Returns a script that never says the same twice, as a sampler: tools are called on every second turn."""
    numbers = itertools.count()

    def say(body: JSON) -> str | list[JSON]:
        number = next(numbers)
        if body.get("tools") and len(body["messages"]) % 4 == 1:
            return [call_of("search", {"query": f"q{number} ä"}, number)]
        return f"answer {number} — ö"

    return say


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    """Yields a model server that samples: no two answers are equal."""
    async with Backend(script=unequal_answers()) as running:
        yield running


class Agent:
    """An agent that converses for some turns, and calls tools that always return the same."""

    def __init__(self, proxy: RunningProxy, key: str, *, stream: bool = False, task: str = "the task") -> None:
        self.proxy = proxy
        self.key = key
        self.stream = stream
        self.messages: list[JSON] = [{"role": "user", "content": task}]
        self.replayed: list[bool] = []

    async def run(self, turns: int) -> list[JSON]:
        """Makes calls; returns the conversation."""
        for _ in range(turns):
            said = await self._call()
            self.messages.append(said)
            if said.get("tool_calls"):
                found = json.loads(said["tool_calls"][0]["function"]["arguments"])["query"]
                self.messages.append(
                    {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": f"found {found}"}
                )
            else:
                self.messages.append({"role": "user", "content": "go on"})
        return self.messages

    async def _call(self) -> JSON:
        body = {"model": MODEL, "messages": self.messages, "tools": TOOLS, "temperature": 0.7, "stream": self.stream}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.proxy.http.post(f"{self.proxy.url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            self.replayed.append("x-fulmen-replayed" in answer.headers)
            if not self.stream:
                return {k: v for k, v in (await answer.json())["choices"][0]["message"].items() if v is not None}
            return assembled((await answer.text()).splitlines())


def assembled(lines: list[str]) -> JSON:
    """Returns the message of a stream, as clients put it together."""
    message: JSON = {"role": "assistant"}
    for line in lines:
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = message.get("content", "") + delta["content"]
            for call in delta.get("tool_calls") or ():
                parts = message.setdefault(
                    "tool_calls", [{"type": "function", "function": {"name": "", "arguments": ""}}]
                )
                parts[0]["id"] = call.get("id") or parts[0].get("id")
                for name in ("name", "arguments"):
                    parts[0]["function"][name] += call.get("function", {}).get(name) or ""
    return message


def second(proxy: RunningProxy, first: str, *, number: int = 2, continues: int = 1, **more: Any) -> tuple[str, str]:
    """Returns the next attempt of a rollout, which continues a lost one, and its key."""
    return proxy.attempt(rollout_id=parse_attempt_name(first).rollout_id, number=number, continues=continues, **more)


def sampled(spans: list[tuple[Span, ModelCallRecord | None]]) -> list[tuple[Any, ...]]:
    """Returns all that training reads of an attempt's calls."""
    found = []
    for _, record in spans:
        assert record is not None
        assert record.usable, record.unusable_reason
        found.append(
            (
                record.prompt_token_ids, record.completion_token_ids, record.completion_logprobs,
                [(part.version, part.start, part.end) for part in record.policy_versions], record.finish_reason,
                record.policy, record.temperature, record.completion_token_text, list(record.completion_token_sizes),
            )
        )  # fmt: skip
    return found


def tokens_counted(proxy: RunningProxy) -> float:
    """Returns the tokens of all calls."""
    return sum(
        sample.value
        for metric in proxy.registry.collect()
        for sample in metric.samples
        if sample.name == "fulmen_llm_proxy_tokens_total"
    )


def originals(spans: list[tuple[Span, ModelCallRecord | None]]) -> list[str]:
    """Returns the spans whose tokens were given again; empty texts for sampled ones."""
    return [
        next((each.value.string_value for each in span.attributes if each.key == REPLAYED_ATTRIBUTE), "")
        for span, _ in spans
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_attempt_goes_on_where_the_lost_one_was(
    store: FakeStore, backend: Backend, proxy: RunningProxy, stream: bool
) -> None:
    lost, lost_key = proxy.attempt()
    before = await Agent(proxy, lost_key, stream=stream).run(6)
    calls = len(backend.received)
    # Meanwhile the policy has moved on: what was sampled keeps its version.
    await proxy.put_route(target("one", version=2))

    attempt, key = second(proxy, lost)
    agent = Agent(proxy, key, stream=stream)
    after = await agent.run(9)

    assert after[: len(before)] == before
    assert agent.replayed == [True] * 6 + [False] * 3
    assert len(backend.received) == calls + 3
    summary = await proxy.flush(attempt)
    assert (summary.call_count, summary.unusable_count) == (9, 0)
    spans = store.spans(attempt)
    assert sampled(spans)[:6] == sampled(store.spans(lost))
    assert originals(spans) == [span.span_id.hex() for span, _ in store.spans(lost)] + [""] * 3
    versions = [record.policy_versions[0].version for _, record in spans if record is not None]
    assert versions == [1] * 6 + [2] * 3
    assert proxy.metric("replayed_calls_total") == 6
    assert proxy.metric("replays_total", end="complete") == 1
    trained = trajectory([chunk for chunk in store.chunks.values() if chunk.attempt == attempt])
    assert not trained.dropped


async def test_an_agent_that_asks_something_else_is_sampled_from_there(
    store: FakeStore, backend: Backend, proxy: RunningProxy
) -> None:
    lost, lost_key = proxy.attempt()
    await Agent(proxy, lost_key).run(4)
    attempt, key = second(proxy, lost)
    agent = Agent(proxy, key)
    await agent.run(2)
    agent.messages[-1]["content"] = "another way"
    await agent.run(2)

    assert agent.replayed == [True, True, False, False]
    await proxy.flush(attempt)
    assert [bool(each) for each in originals(store.spans(attempt))] == [True, True, False, False]
    assert proxy.metric("replays_total", end="diverged") == 1


async def test_an_attempt_that_is_lost_while_it_repeats_calls_is_continued_from_the_first_one(
    store: FakeStore, backend: Backend, proxy: RunningProxy
) -> None:
    first, first_key = proxy.attempt()
    before = await Agent(proxy, first_key).run(5)
    calls = len(backend.received)
    lost_again, key = second(proxy, first)
    await Agent(proxy, key).run(2)
    third, key = second(proxy, first, number=3)
    agent = Agent(proxy, key)
    assert await agent.run(5) == before
    assert len(backend.received) == calls

    fourth, key = second(proxy, first, number=4)
    await proxy.flush(third)
    assert await Agent(proxy, key).run(5) == before
    await proxy.flush(fourth)
    spans = [span.span_id.hex() for span, _ in store.spans(first)]
    assert originals(store.spans(third)) == originals(store.spans(fourth)) == spans
    assert originals(store.spans(lost_again)) == spans[:2]


async def test_a_proxy_that_starts_meanwhile_gives_nothing_twice(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url) as proxy:
        lost, lost_key = proxy.attempt()
        # Two samples of the same request, one after the other.
        said = [(await proxy.chat(lost_key, "the same"))[1]["choices"][0]["message"]["content"] for _ in range(2)]
        attempt, key = second(proxy, lost)
        assert (await proxy.chat(key, "the same"))[1]["choices"][0]["message"]["content"] == said[0]
        await proxy.flush(attempt)
    async with running_proxy(store.target) as proxy:
        await proxy.loaded()
        assert (await proxy.chat(key, "the same"))[1]["choices"][0]["message"]["content"] == said[1]
        assert (await proxy.chat(key, "the same"))[1]["choices"][0]["message"]["content"] not in said


@pytest.mark.parametrize(
    ("path", "request_of"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}),
        ("completions", {"prompt": ["one", "two"], "n": 2}),
        ("messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 99}),
    ],
    ids=["wanted log-probabilities", "several choices", "translated"],
)
async def test_answers_come_as_before(
    store: FakeStore, proxy: RunningProxy, path: str, request_of: dict[str, Any]
) -> None:
    async def ask(key: str) -> JSON:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": MODEL, **request_of}
        async with proxy.http.post(f"{proxy.url}/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200
            found: JSON = await answer.json()
            return found

    lost, lost_key = proxy.attempt()
    before = await ask(lost_key)
    attempt, key = second(proxy, lost)
    after = await ask(key)
    assert after == before
    await proxy.flush(attempt)
    assert sampled(store.spans(attempt)) == sampled(store.spans(lost))
    assert len(store.spans(lost)) == len(before.get("choices", "."))


@pytest.mark.parametrize(
    ("path", "request_of", "said"),
    [
        ("messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 99}, "answer 0"),
        ("responses", {"input": "hello", "store": False}, "answer 0"),
        ("completions", {"prompt": "one"}, '"text":"eno"'),
    ],
)
async def test_streams_of_every_api_say_the_same_again(
    store: FakeStore, backend: Backend, proxy: RunningProxy, path: str, request_of: dict[str, Any], said: str
) -> None:
    async def ask(key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": MODEL, "stream": True, **request_of}
        async with proxy.http.post(f"{proxy.url}/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200
            return await answer.text()

    lost, lost_key = proxy.attempt()
    await ask(lost_key)
    attempt, key = second(proxy, lost)
    assert said in await ask(key)
    assert len(backend.received) == 1
    await proxy.flush(attempt)
    assert sampled(store.spans(attempt)) == sampled(store.spans(lost))


@pytest.mark.parametrize("settings", [{"replay_bytes": 0}, {"replay_bytes": 64}], ids=["off", "too small"])
async def test_without_room_for_captures_everything_is_sampled_anew(
    store: FakeStore, backend: Backend, settings: dict[str, Any]
) -> None:
    async with running_proxy(store.target, backend_url=backend.url, **settings) as proxy:
        lost, lost_key = proxy.attempt()
        await Agent(proxy, lost_key).run(2)
        _, key = second(proxy, lost)
        agent = Agent(proxy, key)
        await agent.run(2)
        assert agent.replayed == [False, False]
        assert len(backend.received) == 4


async def test_attempts_that_were_lost_again_make_room_for_others(store: FakeStore, backend: Backend) -> None:
    task = "a long task " * 2000
    async with running_proxy(store.target, backend_url=backend.url, replay_bytes=8 * 512 * 1024) as proxy:
        lost, lost_key = proxy.attempt()
        await Agent(proxy, lost_key, task=task).run(3)
        for number in range(2, 27):
            _, key = second(proxy, lost, number=number, continues=1)
            agent = Agent(proxy, key, task=task)
            await agent.run(1)
            assert agent.replayed == [True]
        assert len(backend.received) == 3
        assert proxy.metric("replays_total", end="no_room")


async def test_what_is_given_again_costs_nothing(store: FakeStore, backend: Backend) -> None:
    prices = {"*": {"input": 1.0, "output": 1.0}}
    async with running_proxy(store.target, backend_url=backend.url, prices=prices) as proxy:
        lost, lost_key = proxy.attempt()
        await Agent(proxy, lost_key).run(3)
        counted = tokens_counted(proxy)
        # A budget that the repeated calls alone would exceed.
        attempt, key = second(proxy, lost, token_budget=200)
        agent = Agent(proxy, key)
        await agent.run(3)
        assert agent.replayed == [True] * 3
        assert tokens_counted(proxy) == counted > 0
        await proxy.flush(attempt)
        costs = [[each.key for each in span.attributes if "cost" in each.key] for span, _ in store.spans(attempt)]
        assert costs == [[]] * 3
        assert all(any("cost" in each.key for each in span.attributes) for span, _ in store.spans(lost))


async def test_tokens_that_an_attempt_has_twice_are_trained_on_once(
    store: FakeStore, backend: Backend, proxy: RunningProxy
) -> None:
    lost, lost_key = proxy.attempt()
    await proxy.chat(lost_key)
    attempt, key = second(proxy, lost)
    await proxy.chat(key)
    await proxy.flush(attempt)
    [chunk] = [chunk for chunk in store.chunks.values() if chunk.attempt == attempt]
    [call] = read_calls([chunk])
    again = type(call)(**{name: getattr(call, name) for name in call.__slots__} | {"span_id": b"another1"})
    assert call.replayed
    assert drop_reasons([call, again]) == [None, DropReason.REPEATED]


async def test_conversations_beside_each_other_are_repeated_in_any_order(
    store: FakeStore, backend: Backend, proxy: RunningProxy
) -> None:
    async def team(key: str, *, order: int) -> dict[str, list[JSON]]:
        agents = {f"role {number}": Agent(proxy, key, task=f"role {number}") for number in range(4)}
        await asyncio.gather(*(agent.run(3) for agent in list(agents.values())[::order]))
        return {role: agent.messages for role, agent in agents.items()}

    lost, lost_key = proxy.attempt()
    before = await team(lost_key, order=1)
    attempt, key = second(proxy, lost)
    assert await team(key, order=-1) == before
    assert len(backend.received) == 12
    await proxy.flush(attempt)
    assert sorted(originals(store.spans(attempt))) == sorted(span.span_id.hex() for span, _ in store.spans(lost))


async def test_two_proxies_repeat_the_calls_of_one_attempt(store: FakeStore, backend: Backend) -> None:
    async with (
        running_proxy(store.target, backend_url=backend.url) as one,
        running_proxy(store.target) as other,
    ):
        await other.loaded()
        lost, lost_key = one.attempt()
        before = await Agent(one, lost_key).run(6)
        same = [(await one.chat(lost_key, "the same"))[1]["id"] for _ in range(2)]
        calls = len(backend.received)
        attempt, key = second(one, lost)
        agent = Agent(one, key)
        for turn in range(6):
            # Each connection may lead to another one.
            agent.proxy = (one, other)[turn % 2]
            await agent.run(1)
        assert agent.messages == before
        assert len(backend.received) == calls
        # Nobody knows which of two equal samples the other one has given: none is.
        again = [(await each.chat(key, "the same"))[1]["id"] for each in (one, other)]
        assert len({*same, *again}) == 4
        await one.flush(attempt)
        await other.flush(attempt)
        given = [each for each in originals(store.spans(attempt)) if each]
        assert len(given) == len(set(given)) == 6
