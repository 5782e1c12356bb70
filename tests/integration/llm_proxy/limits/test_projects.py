"""One proxy serves several projects, whose models have the same name and one of which floods it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen.store.v1.model_limits_pb2 import SpendBudget
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.limits_world import CALL_MICROS, PRICES, set_limits
from tests.support.store.running import LIMIT_S, SIGNING_KEY, create_project, running_store

TEAMS = ("flood", "calm", "thrifty")
NAME = "support"
AT_ONCE = 8
FLOOD = 200


async def put(proxy: RunningProxy, team: str, backend: Backend) -> None:
    """Puts a team's model `support`, which one backend of its own serves."""
    await proxy.register(team, backend.url)
    route = route_pb2.Route(
        name=f"routes/{team}.{NAME}", targets=[target(team, policy=NAME)], project=f"projects/{team}"
    )
    await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))


async def test_models_of_one_name_are_each_projects_own_and_a_flood_of_one_fails_no_call_of_the_others(
    database_url: str,
) -> None:
    settings: dict[str, Any] = {"signing_key": SIGNING_KEY, "prices": PRICES, "project_max_calls": AT_ONCE}
    async with (
        asyncio.timeout(3 * LIMIT_S),
        Backend() as flooded,
        Backend() as calm,
        Backend() as thrifty,
        running_store(database_url) as store,
        running_proxy(store.target, **settings) as proxy,
    ):
        stubs = await store.stubs()
        for team in TEAMS:
            await create_project(stubs, f"projects/{team}")
        backends = dict(zip(TEAMS, (flooded, calm, thrifty), strict=True))
        for team, backend in backends.items():
            await put(proxy, team, backend)
        # An operator's model of the name is another one: projects with an own one do not get it.
        await proxy.put_route(target("calm"), model=NAME)
        await set_limits(stubs, "projects/thrifty", budgets=[SpendBudget(subject="project", limit_micros=CALL_MICROS)])
        await proxy.parts.roles["usage-sync"].sync()  # type: ignore[attr-defined]  # the role is one
        keys = {team: store.token(Role.CLIENT, project=f"projects/{team}") for team in TEAMS}

        flooded.switches.gate = asyncio.Event()
        flood = [asyncio.create_task(proxy.chat(keys["flood"], model=NAME)) for _ in range(FLOOD)]
        for _ in range(AT_ONCE):
            await flooded.arrived.acquire()
        answers = [await proxy.chat(keys["calm"], model=NAME) for _ in range(3 * AT_ONCE)]
        assert {status for status, _ in answers} == {200}
        assert (await proxy.chat(keys["thrifty"], model=NAME))[0] == 200
        status, refused = await proxy.chat(keys["thrifty"], model=NAME)
        assert (status, refused["error"]["code"]) == (403, "budget_exceeded")
        flooded.switches.gate.set()
        ended = Counter(status for status, _ in await asyncio.gather(*flood))
        assert set(ended) == {200, 429}
        assert ended[200] >= AT_ONCE

        assert [len(backend.received) for backend in (calm, thrifty)] == [3 * AT_ONCE, 1]
        async with proxy.http.get(f"{proxy.url}/models", headers={"Authorization": f"Bearer {keys['calm']}"}) as answer:
            assert [each["id"] for each in (await answer.json())["data"]] == ["calm.support", NAME]
        assert (await proxy.chat(keys["calm"], model="flood.support"))[0] == 404
        await proxy.parts.roles["usage-sync"].sync()  # type: ignore[attr-defined]  # the role is one
        for team, calls in (("flood", ended[200]), ("calm", 3 * AT_ONCE), ("thrifty", 1)):
            request = usage_pb.GetUsageRequest(project=f"projects/{team}", group_by=usage_pb.USAGE_GROUPING_MODEL)
            groups = {each.name: each.usage for each in (await stubs.usage.GetUsage(request)).groups}
            assert groups[f"{team}.{NAME}"].request_count == calls
