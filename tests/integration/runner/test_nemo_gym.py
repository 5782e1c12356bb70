"""NeMo Gym's rows as tasks of an agent: fifty score as by NeMo Gym's simple agent, whose scores were recorded.

The record was made by tests/support/environments/nemo_gym/record.py with nemo-gym 0.4. The server here has the same rules and protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from fulmen.integrations.environments import EnvironmentInvalid
from fulmen.integrations.nemo_gym import convert
from tests.support.environments.episodes import scored_by
from tests.support.environments.nemo_gym.rules import begin, reward, rows, said
from tests.support.frameworks.traced import Stage, a_stage
from tests.support.runner.harness import bundle_of, spec_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1300)]

SCORES = json.loads(Path(__file__).with_name("data").joinpath("nemo_gym_scores.json").read_text(encoding="utf-8"))


def model(body: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Says or calls what the rules name."""
    answered = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    what, text = said(body["messages"][0]["content"], answered)
    function = {"name": "add", "arguments": text}
    return text if what == "tell" else [{"id": "call_1", "type": "function", "function": function}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, the scripted model and a proxy."""
    async with a_stage(model) as stage:
        yield stage


@asynccontextmanager
async def resources_server() -> AsyncIterator[str]:
    """Runs a resources server with the rules of the record; yields its address."""
    counters: dict[str, int] = {}
    numbers = itertools.count()

    async def seed(request: web.Request) -> web.Response:
        session = str(next(numbers))
        counters[session] = begin(await request.json())
        answer = web.json_response({})
        answer.set_cookie("session", session)
        return answer

    async def add(request: web.Request) -> web.Response:
        counters[request.cookies["session"]] += (await request.json())["number"]
        return web.json_response({"counter": counters[request.cookies["session"]]})

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["response"]["object"] == "response"
        assert body["responses_create_params"]["tools"][0]["name"] == "add"
        value = reward(body["wanted"], counters[request.cookies["session"]], body["response"]["output"])
        return web.json_response({**body, "reward": value})

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response({"paths": {"/seed_session": {}, "/add": {}, "/verify": {}}})

    app = web.Application()
    app.add_routes([web.post("/seed_session", seed), web.post("/add", add), web.post("/verify", verify)])
    app.add_routes([web.get("/openapi.json", openapi)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def converted(url: str, data: Any, **settings: Any) -> Any:
    """Converts in a thread: the server is in this loop."""
    return await asyncio.to_thread(lambda: convert(url, data, **{"model": "tiny", **settings}))


async def test_fifty_rows_score_as_by_nemo_gyms_simple_agent(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")

    async with resources_server() as url:
        made = await converted(url, file)
        done = await scored_by(
            stage, bundle_of({}), lambda bundle: spec_of(bundle=bundle, python=made.agent.python), made.tasks
        )

    assert done.failures == []
    assert done.scores == SCORES
    assert set(SCORES) == {0.0, 0.25, 1.0}


async def test_malformed_rows_and_servers_are_refused_with_every_problem(stage: Stage) -> None:
    tool = {"type": "function", "name": "subtract"}
    wrong = [{"input": "x"}, {"responses_create_params": {"input": "x", "tools": [tool]}}, "text"]

    async with resources_server() as url:
        with pytest.raises(EnvironmentInvalid) as error:
            await converted(url, wrong, model="")
    assert str(error.value).splitlines()[1:] == [
        "model: it has no name",
        "row 1: it has no responses_create_params with an input",
        "row 2: the server has no tool 'subtract'",
        "row 3: it has no responses_create_params with an input",
    ]
    with pytest.raises(
        EnvironmentInvalid, match=r"rows: the list is empty\nthe server does not answer at http://127.0.0.1:9/"
    ):
        await converted("http://127.0.0.1:9", [])
