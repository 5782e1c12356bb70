"""One case: agents that call in a closed loop, through a proxy of their own, engines that begin with empty caches.

Everything runs in one loop, whose clock leaps (`tests/support/leaping_clock.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp

from benchmarks.routing.consumer import Consumer, Training
from benchmarks.routing.rules import ALL, AttemptHash, ByProxy, Oracle, RoundRobin, Rule, route_of
from benchmarks.routing.trace import Agent, agents
from fulmen.llm_proxy.v1 import (
    backend_pb2,
    route_pb2,
    route_service_pb2,
)
from tests.support import leaping_clock
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.simulated_engine import Timings
from tests.support.llm_proxy.simulated_server import SimulatedServer, prompt_of

ENGINES = 4
FITS = 128
"""Agents whose conversations the caches hold together."""

MEASURED_S = 40.0
SEED = 1
_MAX_IN_FLIGHT = 4000
_BALANCINGS = {
    "sticky": route_pb2.BALANCING_STICKY,
    "prefix cache": route_pb2.BALANCING_PREFIX_CACHE,
}
_FORGET_EVERY_S = 1.0
_KEY_S = 3600.0
"""A long case takes many minutes on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run.

    Attributes:
        rule: `round robin`, `attempt hash`, `oracle`, or a balancing of the proxy.
        agents: how many run at once.
        by_turns: whether the proxy lets in only as many as the caches hold.
        begun: how many begin in the middle of an attempt, no more than fit: otherwise all conversations would be short in
            the beginning, and long together.
        engines: how many serve the policy.
        training: what takes the rollouts, if something does.
        timings: those of each engine.
        warm_s: time before the figures count, seconds.
        measured_s: time in which they count, seconds.
    """

    rule: str
    agents: int
    by_turns: bool = False
    begun: int = FITS
    engines: int = ENGINES
    training: Training | None = None
    timings: Timings = field(default_factory=Timings)
    warm_s: float = 20.0
    measured_s: float = MEASURED_S

    @property
    def name(self) -> str:
        """What it is called in the results."""
        long = f", {self.measured_s:g} s" if self.measured_s > MEASURED_S else ""
        return f"{self.rule}{' by turns' if self.by_turns else ''}, {self.agents} agents{long}"


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the agents see."""

    statuses: Counter[int] = field(default_factory=Counter)
    attempts: int = 0
    answer_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the engines have done so far."""

    queried: tuple[int, ...]
    hits: tuple[int, ...]
    calls: tuple[int, ...]


class Run:
    """A case while it runs."""

    def __init__(self, case: Case, proxy: RunningProxy, servers: Sequence[SimulatedServer]) -> None:
        self._case = case
        self._proxy = proxy
        self._servers = servers
        self._rule = _rule(case, servers)
        self._consumer = Consumer(case.training, [server.engine for server in servers]) if case.training else None
        self._counts = Counts()
        self._trace = agents(SEED)
        self._clock = asyncio.get_running_loop().time

    async def measure(self) -> dict[str, float]:
        """Lets the agents run, and returns the figures of the measured time."""
        case = self._case
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            running = [
                asyncio.create_task(self._agent(session, number), name=f"agent-{number}")
                for number in range(case.agents)
            ]
            if self._consumer:
                running.append(asyncio.create_task(self._consumer.run(), name="consumer"))
            await _pause(case.warm_s, running)
            self._counts = Counts()
            before, began = self._totals(), self._clock()
            await _pause(case.measured_s, running)
            after, counts, elapsed_s = self._totals(), self._counts, self._clock() - began
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return _figures(before, after, counts, elapsed_s)

    def _totals(self) -> Totals:
        engines = [server.engine for server in self._servers]
        return Totals(
            queried=tuple(one.queried_tokens for one in engines),
            hits=tuple(one.hit_tokens for one in engines),
            calls=tuple(one.finished for one in engines),
        )

    async def _agent(self, session: aiohttp.ClientSession, number: int) -> None:
        """Works off attempts, one after the other; the agents begin spread over a third of the warm-up."""
        await asyncio.sleep(self._case.warm_s / 3 * number / self._case.agents)
        over = random.Random(number).random() if number < self._case.begun else 0.0
        while True:
            if self._consumer:
                await self._consumer.begin()
            agent = next(self._trace)
            attempt, key = self._proxy.attempt(ttl_s=_KEY_S)
            await self._attempt(session, agent, attempt, key, over=over)
            over = 0.0
            await self._proxy.flush(attempt)
            self._counts.attempts += 1
            if self._consumer:
                await self._consumer.end()

    async def _attempt(
        self, session: aiohttp.ClientSession, agent: Agent, attempt: str, key: str, *, over: float
    ) -> None:
        """Makes the calls of an attempt, from where it is.

        Args:
            over: share of its turns that are over.
        """
        messages = [{"role": "system", "content": agent.system}, {"role": "user", "content": agent.task}]
        turns = list(agent.turns())
        for number, turn in enumerate(turns):
            if number < int(over * len(turns)):
                answer = turn.result[: turn.answer_tokens]
                messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": turn.result}]
                continue
            model = self._rule.begin(attempt, prompt_of(messages))
            try:
                answer = await self._call(session, key, model, messages, turn.answer_tokens)
            finally:
                self._rule.end(model)
            messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": turn.result}]
            await asyncio.sleep(turn.pause_s)

    async def _call(
        self, session: aiohttp.ClientSession, key: str, model: str, messages: list[dict[str, str]], tokens: int
    ) -> str:
        body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
        url = f"{self._proxy.url}/chat/completions"
        began, first_s, pieces = self._clock(), 0.0, []
        async with session.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        first_s = first_s or self._clock() - began
                        pieces.append(choice["delta"].get("content") or "")
            counts = self._counts
            counts.statuses[answer.status] += 1
        counts.first_token_s.append(first_s)
        counts.answer_tokens += tokens
        return "".join(pieces)


async def _pause(seconds: float, running: Sequence[asyncio.Task[None]]) -> None:
    """Lets the agents run for so long.

    Raises:
        Exception: what ended one of them.
    """
    done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


def _rule(case: Case, servers: Sequence[SimulatedServer]) -> Rule:
    if case.rule == "round robin":
        return RoundRobin(len(servers))
    if case.rule == "attempt hash":
        return AttemptHash(len(servers))
    if case.rule == "oracle":
        return Oracle([server.engine for server in servers])
    return ByProxy()


def _figures(before: Totals, after: Totals, counts: Counts, elapsed_s: float) -> dict[str, float]:
    calls = [now - then for now, then in zip(after.calls, before.calls, strict=True)]
    firsts = sorted(counts.first_token_s)
    queried, hits = sum(after.queried) - sum(before.queried), sum(after.hits) - sum(before.hits)
    made = counts.statuses.total()
    return {
        "calls": sum(calls),
        "hit_rate": round(hits / queried, 4),
        "calls_per_s": round(sum(calls) / elapsed_s, 2),
        "answer_tokens_per_s": round(counts.answer_tokens / elapsed_s, 1),
        "first_token_p50_s": round(firsts[len(firsts) // 2], 3),
        "first_token_p99_s": round(firsts[int(len(firsts) * 0.99)], 3),
        "busiest_to_idlest": round(max(calls) / max(1, min(calls)), 3),
        "attempts_ended": counts.attempts,
        "mean_prompt_tokens": round(queried / sum(calls)),
        "failed_calls": made - counts.statuses[200],
    }


async def run(case: Case) -> dict[str, float]:
    """Runs one case and returns its figures; times and rates are those of the simulation."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(SimulatedServer(case.timings).running()) for _ in range(case.engines)
        ]
        store = await stack.enter_async_context(FakeStore())
        share = 1.0 if case.by_turns else 0.0
        proxy = await stack.enter_async_context(running_proxy(store.target, engine_cache_share=share))
        await _put_routes(proxy, case, [server.url for server in servers])
        forgetting = asyncio.create_task(_forget(store), name="forget-captures")
        stack.callback(forgetting.cancel)
        leaping_clock.leap()
        return await Run(case, proxy, servers).measure()


async def _forget(store: FakeStore) -> None:
    """Keeps the store small."""
    while True:
        await asyncio.sleep(_FORGET_EVERY_S)
        store.chunks.clear()


async def _put_routes(proxy: RunningProxy, case: Case, urls: Sequence[str]) -> None:
    targets = []
    for number, url in enumerate(urls):
        name = route_of(number)
        await proxy.register(
            name, url, engine=backend_pb2.ENGINE_VLLM, max_in_flight=_MAX_IN_FLIGHT, returns_token_ids=False
        )
        targets.append(route_pb2.RouteTarget(backend=f"backends/{name}", weight=1))
        await proxy.put_route(targets[-1], model=name)
    balancing = _BALANCINGS.get(case.rule, route_pb2.BALANCING_STICKY)
    route = route_pb2.Route(name=f"routes/{ALL}", targets=targets, balancing=balancing)
    await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
