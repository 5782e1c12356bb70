"""Every HTTP port refuses a request without a host, with two hosts, and with two credentials, in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fulmen_service_kit.observability.telemetry import serve_metrics
from fulmen_service_kit.readiness import Readiness
from fulmen_store.settings import StoreSettings
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.store.running import SIGNING_KEY, StoreHandle

LIMIT_S = 20
LOOPBACK = "127.0.0.1"
PORTS = ("the proxy", "OTLP of the store", "metrics")
Ask = Callable[..., Any]


@pytest.fixture
async def proxy(store: StoreHandle) -> AsyncIterator[RunningProxy]:
    async with running_proxy(store.target, signing_key=SIGNING_KEY) as running:
        yield running


@pytest.fixture
async def ask(store: StoreHandle, proxy: RunningProxy) -> AsyncIterator[Ask]:
    """Yields a function that sends the head of a request to one of the ports and returns the status."""
    settings = StoreSettings(database_url="postgresql://nowhere", signing_key=SIGNING_KEY, metrics_port=0)
    metrics_port, metrics = serve_metrics(settings, Readiness())
    ports = {
        "the proxy": proxy.parts.ports["http_port"],
        "OTLP of the store": store.parts.ports["http_port"],
        "metrics": metrics_port,
    }

    async def status(port: str, *lines: bytes, version: bytes = b"1.1", path: bytes = b"/healthz") -> int:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[port])
            writer.write(b"\r\n".join((b"GET " + path + b" HTTP/" + version, *lines, b"connection: close", b"", b"")))
            answer = await reader.read()
            writer.close()
        return int(answer.split()[1])

    yield status
    metrics.shutdown()
    metrics.server_close()


@pytest.mark.parametrize("port", PORTS)
async def test_a_request_names_one_host(ask: Ask, port: str) -> None:
    assert await ask(port, b"host: x") == 200
    assert await ask(port) == 400
    assert await ask(port, b"host: x", b"host: x") == 400
    assert await ask(port, b"host: x", b"Host: y", version=b"1.0") == 400
    assert await ask(port, version=b"1.0") == 200


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"api-key"])
async def test_the_proxy_takes_one_credential_of_a_kind(ask: Ask, store: StoreHandle, name: bytes) -> None:
    token = (b"Bearer " if name == b"authorization" else b"") + store.token().encode()
    good, empty, bad = (name + b": " + value for value in (token, b"", b"Bearer forged"))
    for pair in ((good, good), (good, bad), (bad, good), (empty, good), (good, empty)):
        assert await ask("the proxy", b"host: x", *pair, path=b"/v1/models") == 401
    assert await ask("the proxy", b"host: x", good, path=b"/v1/models") == 200


@pytest.mark.parametrize("path", [b"/nothing", b"/v1/nothing", b"/v1/traces", b"/v1/chat/completions"])
async def test_what_nobody_serves_is_refused_late_without_a_token(
    ask: Ask, proxy: RunningProxy, store: StoreHandle, path: bytes
) -> None:
    for port, limits in (("the proxy", proxy.parts.server.limits), ("OTLP of the store", store.parts.server.limits)):
        asking = asyncio.create_task(ask(port, b"host: x", path=path))
        while not limits.refusals.is_holding(LOOPBACK):
            assert not asking.done()
            await asyncio.sleep(0)
        assert await asking in (404, 405)
        assert await ask(port, b"host: x") == 200
        assert not limits.refusals.is_holding(LOOPBACK)
