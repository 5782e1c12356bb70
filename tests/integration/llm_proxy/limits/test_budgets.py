"""Budgets in dollars: two proxies on one store stop calls together, and say which budget and how to raise it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.store.v1 import project_service_pb2
from fulmen.store.v1.model_limits_pb2 import BUDGET_PERIOD_DAY, SpendBudget
from fulmen_service_kit.security.tokens import Role, TokenVerifier
from tests.support.llm_proxy.harness import MODEL, target
from tests.support.llm_proxy.limits_world import CALL_MICROS, DEFAULT, World
from tests.support.store.running import LIMIT_S, SIGNING_KEY

AGENT = "resources/agent.helper/versions/3"
Answer = tuple[int, dict[str, Any]]


def budget(subject: str, *, calls: float = 2, period: int = 0) -> SpendBudget:
    """Returns a budget that lasts for so many calls."""
    return SpendBudget(subject=subject, limit_micros=round(calls * CALL_MICROS), period=period)  # type: ignore[arg-type]


async def code(call: Awaitable[Answer]) -> str:
    """Returns `ok` or the code of a call's error."""
    status, answer = await call
    return "ok" if status == 200 else answer["error"]["code"]


async def spent(world: World) -> dict[str, int]:
    """Returns what the store says is spent, by subject, after both proxies have reported."""
    await world.sync()
    answer = await world.stubs.projects.GetProject(project_service_pb2.GetProjectRequest(name=DEFAULT))
    return {each.subject: each.spent_micros for each in answer.project.model_limits.budgets}


async def test_a_projects_budget_stops_its_calls_at_every_proxy_and_says_how_to_raise_it(world: World) -> None:
    await world.limit(budgets=[budget("project")])
    key, (first, second) = world.store.token(Role.CLIENT), world.proxies
    assert await code(first.chat(key)) == "ok"
    assert await spent(world) == {"project": CALL_MICROS}
    assert await code(second.chat(key)) == "ok"
    await world.sync()
    for proxy in world.proxies:
        status, answer = await proxy.chat(key)
        assert (status, answer["error"]["code"]) == (403, "budget_exceeded")
        assert f"of {DEFAULT} is used up" in answer["error"]["message"]
        assert "`fulmen project update default --budget project=DOLLARS`" in answer["error"]["message"]
        assert proxy.metric("limit_refusals_total", limit="budget", of="project") == 1
    assert len(world.backend.received) == 2

    await world.limit(budgets=[budget("project", calls=3)])
    assert await code(second.chat(key)) == "ok"
    assert await spent(world) == {"project": 3 * CALL_MICROS}


async def test_budgets_of_a_key_an_agent_and_a_run_stop_only_their_calls(world: World) -> None:
    mine, other = world.store.token(Role.CLIENT), world.store.token(Role.CLIENT)
    key_id = TokenVerifier(SIGNING_KEY).verify(mine).token_id
    subjects = [f"key/{key_id}", "agent/agent.helper", "run/first"]
    await world.limit(budgets=[*(budget(each, calls=1) for each in subjects), budget("project", calls=100)])
    helper, learner = await world.attempt(agent=AGENT, run="second"), await world.attempt(run="first")
    free = await world.attempt(agent="resources/agent.other/versions/1", run="second")
    first = world.proxies[0]
    for key, subject in zip((mine, helper.attempt_key, learner.attempt_key), subjects, strict=True):
        assert await code(first.chat(key)) == "ok"
        status, answer = await first.chat(key)
        assert (status, answer["error"]["code"]) == (403, "budget_exceeded")
        assert f"of {subject} in {DEFAULT} is used up" in answer["error"]["message"]
    for key in (other, free.attempt_key):
        assert await code(first.chat(key)) == "ok"
    assert await spent(world) == dict.fromkeys(subjects, CALL_MICROS) | {"project": 5 * CALL_MICROS}


async def test_a_call_that_names_its_attempt_in_the_url_is_paid_by_the_attempts_budgets(world: World) -> None:
    await world.limit(budgets=[budget("agent/agent.helper", calls=1), budget("run/r", calls=1)])
    attempt, proxy = await world.attempt(agent=AGENT), world.proxies[0]
    url = proxy.url.replace("/v1", f"/{attempt.attempt}/v1")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {world.store.token(Role.RUNNER)}"}
    statuses = []
    for _ in range(2):
        async with proxy.http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            statuses.append(answer.status)
    assert statuses == [200, 403]
    assert await spent(world) == {"agent/agent.helper": CALL_MICROS, "run/r": CALL_MICROS}


async def test_a_model_without_a_price_is_refused_only_under_a_budget(world: World) -> None:
    proxy = world.proxies[0]
    unpriced = target("one", policy="", version=0)
    unpriced.backend_model = "no-price"
    await proxy.put_route(unpriced, model="free")
    key = world.store.token(Role.CLIENT)
    assert await code(proxy.chat(key, model="free")) == "ok"
    await world.limit(budgets=[budget("project", calls=100)])
    status, answer = await proxy.chat(key, model="free")
    assert (status, answer["error"]["code"]) == (403, "price_unknown")
    assert "Model 'no-price' of backend 'one' has no price" in answer["error"]["message"]
    assert await code(proxy.chat(key)) == "ok"
    assert await spent(world) == {"project": CALL_MICROS}


async def test_calls_that_run_reserve_what_they_may_cost(world: World) -> None:
    await world.limit(budgets=[SpendBudget(subject="project", limit_micros=CALL_MICROS)])
    key, proxy = world.store.token(Role.CLIENT), world.proxies[0]
    world.backend.switches.gate = asyncio.Event()
    running = asyncio.create_task(proxy.chat(key, max_tokens=1000))
    await asyncio.wait_for(world.backend.arrived.acquire(), LIMIT_S)
    status, answer = await proxy.chat(key)
    assert (status, answer["error"]["code"]) == (429, "model_limit_exceeded")
    world.backend.switches.gate.set()
    assert (await running)[0] == 200
    assert await code(proxy.chat(key)) == "budget_exceeded"


async def test_a_budget_of_a_day_counts_from_nothing_on_the_next_one(world: World, database_url: str) -> None:
    await world.limit(budgets=[budget("project", calls=1, period=BUDGET_PERIOD_DAY)])
    key, proxy = world.store.token(Role.CLIENT), world.proxies[0]
    assert await code(proxy.chat(key)) == "ok"
    status, answer = await proxy.chat(key)
    assert (status, answer["error"]["code"]) == (403, "budget_exceeded")
    assert "per day" in answer["error"]["message"]
    assert "project=DOLLARS/day" in answer["error"]["message"]
    await world.sync()
    connection = await asyncpg.connect(database_url)
    await connection.execute("update budget_spend set period_start = period_start - interval '1 day'")
    await connection.close()
    assert await spent(world) == {"project": 0}
    assert await code(proxy.chat(key)) == "ok"
    assert await spent(world) == {"project": CALL_MICROS}


async def test_malformed_budgets_are_refused_all_at_once(world: World) -> None:
    twice = budget("run/a")
    wrong = [budget("shop"), SpendBudget(subject="run/b", limit_micros=0), twice, twice]
    with pytest.raises(ArgumentInvalid) as error:
        await world.limit(budgets=wrong)
    assert {each.field.removeprefix("project.model_limits.") for each in error.value.violations} == {
        "budgets[0].subject",
        "budgets[1].limit_micros",
        "budgets[3]",
    }
    with pytest.raises(ArgumentInvalid, match="more than 256"):
        await world.limit(budgets=[budget(f"run/{number}") for number in range(300)])
