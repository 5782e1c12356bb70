"""An environment of OpenEnv scores the same as tasks of an agent as under OpenEnv's own harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.support.environments.episodes import FOLDER, native, scored
from tests.support.environments.scripted import choice
from tests.support.frameworks.traced import ENVIRONMENTS, Stage, a_stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1300)]

STARTS_WITHIN_S = 300.0


def guesser(body: dict[str, Any]) -> str:
    """Guesses by the rule, from the last observation."""
    messages = body["messages"][1:]
    turn = sum(message["role"] == "assistant" for message in messages)
    return str(choice(messages[-1]["content"], turn, 20))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, the scripted model and a proxy."""
    async with a_stage(guesser) as stage:
        yield stage


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    """Runs the server of the environment; yields its address when it answers."""
    if not (python := ENVIRONMENTS / "openenv" / "bin" / "python").exists():
        pytest.skip("needs a large environment: tools/framework_envs.sh openenv")
    with_port = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = with_port.sockets[0].getsockname()[1]
    with_port.close()
    await with_port.wait_closed()
    process = await asyncio.create_subprocess_exec(str(python), str(FOLDER / "openenv_server.py"), str(port))
    try:
        async with asyncio.timeout(STARTS_WITHIN_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except ConnectionRefusedError:
                    assert process.returncode is None
                    await asyncio.sleep(0.1)
        writer.close()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_fifty_episodes_score_as_under_openenvs_own_harness(stage: Stage) -> None:
    async with server() as url:
        record = await native("openenv", "openenv_native.py", url)
        done = await scored(stage, "openenv", record["agent"], record["tasks"])

    assert done.failures == []
    assert done.scores == record["scores"]
    assert len(record["scores"]) == 50
    assert len(set(record["scores"])) > 5
    assert stage.outside.knocks == []
    # Malformed ones are refused at once, with every problem.
    silent, misspelt, empty = record["refused"]
    assert "the server does not answer at http://127.0.0.1:9/schema" in silent
    assert "actions have no field 'txt'; they have metadata, text" in misspelt
    assert "score: must be last or sum, not 'mean'" in misspelt
    assert "resets: the list is empty" in empty
    assert "observations have no field 'seen'" in empty
