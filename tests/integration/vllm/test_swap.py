"""New weights under load: no call fails, and every record says which version sampled which tokens."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.llm_proxy.v1 import backend_service_pb2, route_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.algorithm.vllm import BACKEND, VllmServer, settled
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, POLICY, RunningProxy

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

AGENTS = 16
TOKENS = 128
CONTENT = "Count on"
LIMIT_S = 120


@dataclass
class Agent:
    """An agent that calls repeatedly; every second one asks for streams."""

    attempt: str
    key: str
    stream: bool
    answers: list[str] = field(default_factory=list)
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, proxy: RunningProxy, stop: asyncio.Event) -> None:
        """Calls until `stop` is set; raises at the first call that fails."""
        while not stop.is_set():
            text = await self._call(proxy)
            async with self.answered:
                self.answers.append(text)
                self.answered.notify_all()

    async def has(self, count: int) -> None:
        """Waits for that many answers."""
        async with self.answered:
            await self.answered.wait_for(lambda: len(self.answers) >= count)

    async def _call(self, proxy: RunningProxy) -> str:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": CONTENT}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": self.stream,
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
        if not self.stream:
            choice = json.loads(raw)["choices"][0]
            assert choice["finish_reason"] == "length"
            return str(choice["message"]["content"])
        events = [event.removeprefix("data: ") for event in raw.decode().split("\n\n") if event]
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def load(proxy: RunningProxy) -> AsyncIterator[list[Agent]]:
    """Keeps the agents calling while the block runs; fails if a call fails."""
    agents = [Agent(*proxy.attempt(), stream=number % 2 == 1) for number in range(AGENTS)]
    stop = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run(proxy, stop))
        await everybody(agents, 1)
        yield agents
        await everybody(agents, 2)
        stop.set()


async def everybody(agents: list[Agent], more: int) -> None:
    """Waits until each agent has that many more answers."""
    await asyncio.gather(*[agent.has(len(agent.answers) + more) for agent in agents])


async def promote(proxy: RunningProxy, version: int) -> None:
    request = route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=version)
    await proxy.routes.PromoteVersion(request)


async def idle(proxy: RunningProxy) -> None:
    """Returns when the proxy has no call at vLLM."""
    request = backend_service_pb2.GetBackendHealthRequest()
    while [health.in_flight_count for health in (await proxy.backends.GetBackendHealth(request)).backends] != [0]:
        pass


async def records_of(proxy: RunningProxy, store: FakeStore, agent: Agent) -> list[ModelCallRecord]:
    summary = await proxy.flush(agent.attempt)
    assert (summary.flushed, summary.infra_failure_count) == (True, 0)
    found = [record for _, record in store.spans(agent.attempt) if record is not None]
    assert len(found) == summary.call_count == len(agent.answers)
    return found


def ids(record: ModelCallRecord) -> list[int]:
    return array("i", record.completion_token_ids).tolist()


def versions(record: ModelCallRecord) -> list[tuple[int, int, int]]:
    return [(part.version, part.start, part.end) for part in record.policy_versions]


async def greedy_ids(vllm: VllmServer) -> list[int]:
    answer = await asyncio.to_thread(vllm.complete, CONTENT, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return list(answer["choices"][0]["token_ids"])


async def in_vllm(work: Callable[..., object], *arguments: object) -> None:
    await asyncio.to_thread(work, *arguments)


@pytest.mark.long(short=True)
async def test_weights_swapped_while_calls_are_frozen_fail_none_and_are_recorded_per_token(proxy, store, vllm, weights):
    old = await greedy_ids(vllm)
    async with load(proxy) as agents:
        await settled(lambda: vllm.gauge("vllm:num_requests_running") >= AGENTS // 2)
        await in_vllm(vllm.pause, "keep")
        await in_vllm(vllm.load, weights[1], 2)
        await promote(proxy, 2)
        await in_vllm(vllm.resume)
    new = await greedy_ids(vllm)

    assert old != new
    seen: set[tuple[int, ...]] = set()
    for agent in agents:
        records = await records_of(proxy, store, agent)
        for record in records:
            tokens = ids(record)
            named = tuple(part[0] for part in versions(record))
            seen.add((*named, int(agent.stream)))
            assert len(tokens) == TOKENS
            if named == (1,):
                assert tokens == old
            elif named == (2,):
                # A call that vLLM had begun to prepare may have its prompt from the old weights, but no token.
                assert record.usable
            elif agent.stream:
                [(_, _, bound), _] = versions(record)
                assert record.usable
                assert tokens[:bound] == old[:bound]
                assert tokens[bound:] != old[bound:]
            else:
                assert versions(record) == [(1, 0, TOKENS), (2, TOKENS, TOKENS)]
                assert (record.usable, record.unusable_reason) == (False, "policy_version_changed")
        assert versions(records[0]) == [(1, 0, TOKENS)]
        assert versions(records[-1]) == [(2, 0, TOKENS)]
        assert ids(records[-1]) == new
        assert agent.answers[0] != agent.answers[-1]
    assert {(1, 0), (1, 1), (2, 0), (2, 1)} <= seen
    assert seen & {(1, 2, 0), (1, 2, 1)}, "no call was under way when the weights were swapped"


@pytest.mark.long(short=True)
async def test_weights_that_are_swapped_behind_a_hold_leave_every_call_with_one_version(proxy, store, vllm, weights):
    name = f"backends/{BACKEND}"
    old = await greedy_ids(vllm)
    async with load(proxy) as agents:
        hold = backend_service_pb2.HoldBackendRequest(name=name, ttl=Duration(seconds=LIMIT_S))
        await proxy.backends.HoldBackend(hold)
        await idle(proxy)
        await in_vllm(vllm.pause, "wait")
        await in_vllm(vllm.load, weights[1], 2)
        await promote(proxy, 2)
        await in_vllm(vllm.resume)
        await proxy.backends.ReleaseBackend(backend_service_pb2.ReleaseBackendRequest(name=name))
    new = await greedy_ids(vllm)

    assert old != new
    for agent in agents:
        records = await records_of(proxy, store, agent)
        for record in records:
            [(version, start, end)] = versions(record)
            assert (record.usable, start, end) == (True, 0, TOKENS)
            assert ids(record) == {1: old, 2: new}[version]
        assert {part[0] for record in records for part in versions(record)} == {1, 2}


async def test_several_swaps_under_load_fail_no_call(proxy, vllm, weights):
    async with load(proxy) as agents:
        for version in range(2, 8):
            await in_vllm(vllm.pause, "keep")
            await in_vllm(vllm.load, weights[(version + 1) % 2], version)
            await promote(proxy, version)
            await in_vllm(vllm.resume)
            await everybody(agents, 1)
    for agent in agents:
        summary = await proxy.flush(agent.attempt)
        assert (summary.call_count, summary.infra_failure_count) == (len(agent.answers), 0)
