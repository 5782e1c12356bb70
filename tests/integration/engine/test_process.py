import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.algorithm.embedded_engine import CLIENT_DEADLINE, chat_body

START_DEADLINE_S = 90
END_DEADLINE_S = 30
TOKEN = "a token for this test"

Started = tuple[asyncio.subprocess.Process, str]


@pytest.fixture
async def started(model_dirs: list[Path]) -> AsyncIterator[Started]:
    """An engine as a child process, with a token."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "fulmen_algorithm.engines.embedded", "--model", str(model_dirs[0]), "--version", "3"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "FULMEN_ENGINE_TOKEN": TOKEN},
    )
    line = await asyncio.wait_for(process.stdout.readline(), START_DEADLINE_S)
    ready = json.loads(line)
    assert ready["pid"] == process.pid
    yield process, f"http://127.0.0.1:{ready['port']}"
    if process.returncode is None:
        process.kill()
    await process.wait()
    process._transport.close()


async def test_it_serves_callers_with_the_token_and_ends_with_its_parent(started):
    process, url = started
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(url, timeout=CLIENT_DEADLINE) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/v1/chat/completions", "/admin/weights"):
                async with client.post(path, json=chat_body(), headers=headers) as response:
                    assert response.status == 401
        async with client.post("/v1/chat/completions", json=chat_body(), headers=authorized) as response:
            assert (await response.json())["weight_versions"][0]["version"] == 3
        async with client.get("/health") as response:
            assert response.status == 200
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), END_DEADLINE_S) == 0


@pytest.mark.long(short=True)
async def test_it_ends_on_sigterm(started):
    process, _ = started
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), END_DEADLINE_S) == 0
