"""What the client of a Docker engine does when the engine does not answer."""

from __future__ import annotations

import asyncio

from fulmen_runner.agents.container.docker_engine import DockerEngine

LIMIT_S = 30


async def test_an_engine_that_is_closed_pulls_no_more() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        left.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, asyncio.timeout(LIMIT_S):
        engine = DockerEngine(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        pulling = asyncio.create_task(engine.provide_image("image", "always"))
        await asked.wait()
        await engine.close()
        assert "pull image" not in {task.get_name() for task in asyncio.all_tasks()}
        await asyncio.wait({pulling})
        assert pulling.cancelled()
        await left.wait()
