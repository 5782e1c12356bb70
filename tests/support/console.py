"""A console beside a real store, called over HTTP as browsers and curl call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final

import aiohttp

from fulmen_console.app import build
from fulmen_console.settings import ConsoleSettings
from tests.support.store.running import StoreHandle

__all__ = ["ROLLOUTS", "Answer", "Browser", "console_of"]

ROLLOUTS: Final = "fulmen.store.v1.RolloutService"
_END_OF_STREAM: Final = 0b10


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: Any
    headers: Any


@dataclass(slots=True)
class Browser:
    """A client with a jar of cookies, as a browser has it."""

    url: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def call(self, rpc: str, body: Any = None, *, token: str = "", **headers: str) -> Answer:
        """Calls an rpc as JSON."""
        return await self.send("POST", f"/{rpc}", {} if body is None else body, token=token, **headers)

    async def send(self, method: str, path: str, body: Any = None, *, token: str = "", **headers: str) -> Answer:
        """Sends a request; names of headers have `_` for `-`."""
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent["authorization"] = f"Bearer {token}"
        text = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if text is not None:
            sent.setdefault("content-type", "application/json")
        data = None if text is None else BytesIO(text)
        async with self.session.request(method, self.url + path, data=data, headers=sent) as answer:
            raw = await answer.read()
            return Answer(answer.status, json.loads(raw) if raw.startswith(b"{") else raw, answer.headers)

    async def sign_in(self, token: str) -> Answer:
        """Signs in with a token."""
        return await self.send("POST", "/session", {"token": token})

    async def stream(self, rpc: str, body: Any, *, token: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yields the messages of a server stream in the Connect protocol; the last one is that of its end."""
        frame = json.dumps(body).encode()
        headers = self.headers | {"content-type": "application/connect+json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        data = bytes([0]) + len(frame).to_bytes(4, "big") + frame
        async with self.session.post(f"{self.url}/{rpc}", data=data, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            while True:
                head = await answer.content.readexactly(5)
                message = json.loads(await answer.content.readexactly(int.from_bytes(head[1:], "big")))
                if head[0] & _END_OF_STREAM:
                    yield {"end": message}
                    return
                yield message


@asynccontextmanager
async def console_of(store: StoreHandle, **changes: Any) -> AsyncIterator[Browser]:
    """Serves a console of a store until the block ends; a role that ends fails the test."""
    values: dict[str, Any] = {"store_target": store.target, "port": 0, "http_port": 0}
    settings = ConsoleSettings(**(values | changes))
    async with AsyncExitStack() as stack:
        parts = await build(settings, stack)
        await parts.server.server.start()
        stack.push_async_callback(parts.server.server.stop, None)
        roles = [asyncio.create_task(role.run(), name=name) for name, role in parts.roles.items()]
        session = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)))
        try:
            yield Browser(f"http://127.0.0.1:{parts.ports['http_port']}{settings.path_prefix}", session)
            for role in roles:
                assert not role.done(), f"the background role {role.get_name()} ended"
        finally:
            await parts.drain()
            for role in roles:
                role.cancel()
            await asyncio.gather(*roles, return_exceptions=True)
