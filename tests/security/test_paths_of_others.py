"""A key calls models for its own attempt only, however the path is spelled, and the agents' port shows no metrics."""

from __future__ import annotations

import asyncio
import json

from fulmen_service_kit.security.tokens import Role
from tests.security.test_hostile_resources import until_loaded
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.store.running import SIGNING_KEY, StoreHandle

API = "/v1/chat/completions"


async def answered(proxy: RunningProxy, path: str, token: str, method: str = "POST") -> int:
    """Returns the status of a request whose path is sent as it is."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.parts.ports["http_port"])
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with asyncio.timeout(20):
        status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_a_path_reaches_no_attempt_but_the_keys_own(store: StoreHandle) -> None:
    async with Backend() as engine, running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
        await until_loaded(proxy)
        await proxy.register("one", engine.url)
        await proxy.put_route(target("one", policy=""))
        (own, key), (other, _) = proxy.attempt(), proxy.attempt()
        paths = (
            f"/{other}{API}",
            f"//{other}{API}",
            f"/./{other}{API}",
            f"/{own}/../../../../../{other}{API}",
            f"/{own}/{other}{API}",
            f"/{other.replace('/', '%2F')}{API}",
            f"/{other.replace('projects', 'projec%74s')}{API}",
            f"/{other.upper()}{API}",
            f"/{own[:-1]}2{API}",
            f"/{own[:-1]}01{API}",
            f"/{own[:-1]}%D9%A1{API}",  # the Arabic digit 1
            f"/{own.replace('default', 'other')}{API}",
            f"http://proxy/{other}{API}",
        )
        assert {path: status for path in paths if (status := await answered(proxy, path, key)) not in (403, 404)} == {}
        assert engine.received == []
        assert await answered(proxy, f"/{own}{API}", key) == 200
        client = proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=600)
        for path in (
            "/metrics",
            "//metrics",
            "/%6detrics",
            f"/{own}/metrics",
            "http://proxy/metrics",
            "/v1/../metrics",
        ):
            assert await answered(proxy, path, client, "GET") == 404, path
