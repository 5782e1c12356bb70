"""Models that the table does not have: how often the store is asked for them."""

from __future__ import annotations

import asyncio
from typing import cast

from fulmen_llm_proxy.routing.late_routes import LateRoutes
from fulmen_llm_proxy.routing.resources import ResourceWriter
from fulmen_service_kit.security.token_buckets import TokenBuckets

BURST = 3


class Asked:
    """Stands for the store: notes what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.resources: list[str] = []
        self.answer = asyncio.Event()

    async def catch_up(self, resource_id: str) -> None:
        self.resources.append(resource_id)
        await self.answer.wait()


def late_routes(asked: Asked) -> LateRoutes:
    return LateRoutes(cast(ResourceWriter, asked), lookups=TokenBuckets(per_s=1, burst=BURST, clock=lambda: 0.0))


async def test_a_project_asks_for_so_many_models_and_another_is_not_held_up() -> None:
    asked = Asked()
    asked.answer.set()
    routes = late_routes(asked)
    for number in range(20):
        await routes.await_route(f"m{number}", "projects/a")
    await routes.await_route("mine", "projects/b")
    assert asked.resources == ["route.m0", "route.m1", "route.m2", "route.mine"]


async def test_calls_for_one_model_ask_once_and_one_that_leaves_does_not_end_it() -> None:
    asked = Asked()
    routes = late_routes(asked)
    calls = [asyncio.create_task(routes.await_route("m", "projects/a")) for _ in range(20)]
    while not asked.resources:  # noqa: ASYNC110
        await asyncio.sleep(0)
    calls.pop().cancel()
    asked.answer.set()
    await asyncio.gather(*calls)
    assert asked.resources == ["route.m"]
    await routes.await_route("m", "projects/a")
    assert len(asked.resources) == 2, "a later call asks anew"


async def test_names_that_no_route_can_have_are_not_asked_for() -> None:
    asked = Asked()
    for name in ("", "a b", "../x", "x" * 300, "é"):
        await late_routes(asked).await_route(name, "projects/a")
    assert asked.resources == []
