"""Paths that the proxy does not serve are passed on to the backend that the operator names, by callers who may call models."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen.store.v1.model_limits_pb2 import CallLimits, SpendBudget
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.limits_world import set_limits
from tests.support.store.running import LIMIT_S, SIGNING_KEY, StoreHandle, create_project, running_store

KEY = "sk-of-the-vendor"
MAX_BYTES = 1024 * 1024
PATHS = {
    "/v1/files": {"backend": "vendor"},
    "/v1/audio": {"backend": "vendor", "projects": ["projects/team-a"]},
    "/v1/rerank": {"backend": "gone"},
}


@dataclass
class Vendor:
    """A vendor's server: it keeps files, streams transcripts, and notes what it was sent."""

    url: str = ""
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.raw_path, {k.lower(): v for k, v in request.headers.items()}, body))
        path = request.path.removeprefix("/v1")
        if path == "/files/large":
            return web.Response(body=b"x" * (MAX_BYTES + 1))
        if path == "/files/moved":
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})
        if path == "/files/refused":
            return web.Response(status=401, text="wrong key sk-...")
        if path == "/files/missing":
            return web.json_response({"error": {"message": "no such file", "code": "missing"}}, status=404)
        if path == "/files/slow":
            try:
                await self.gate.wait()
            finally:
                self.left.set()
        if path == "/files/events":
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Set-Cookie": "a=b"})
            await stream.prepare(request)
            for piece in (b"data: one\n\n", b"data: two\n\n"):
                await stream.write(piece)
            return stream
        return web.Response(
            body=b"\x00\xff" + body, content_type="audio/mpeg", headers={"X-Request-Id": "r-1", "Server": "secret"}
        )


@dataclass(kw_only=True)
class World:
    """A store with two projects, a proxy that passes paths on, and the vendor's server."""

    store: StoreHandle
    proxy: RunningProxy
    vendor: Vendor

    def key(self, project: str = "projects/team-a", role: Role = Role.CLIENT) -> str:
        return self.store.token(role, project=project)

    async def ask(
        self, method: str, path: str, *, key: str = "", **arguments: Any
    ) -> tuple[int, bytes, aiohttp.typedefs.LooseHeaders]:
        headers = {"Authorization": f"Bearer {key or self.key()}", **arguments.pop("headers", {})}
        url = self.proxy.url.removesuffix("/v1") + path
        async with self.proxy.http.request(method, url, headers=headers, **arguments) as answer:
            return answer.status, await answer.read(), answer.headers

    async def limit(self, **limits: Any) -> None:
        await set_limits(await self.store.stubs(), "projects/team-a", **limits)
        await self.proxy.parts.roles["usage-sync"].sync()  # type: ignore[attr-defined]  # the role is one


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """Yields the world of these tests."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(database_url))
        vendor = Vendor()
        app = web.Application(client_max_size=2 * MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", vendor.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        settings = {
            "pass_on": PATHS,
            "backend_keys": {"vendor": {"key": KEY, "hosts": [f"127.0.0.1:{port}"]}},
            "max_request_bytes": MAX_BYTES,
            "max_answer_bytes": MAX_BYTES,
        }
        proxy = await stack.enter_async_context(running_proxy(store.target, signing_key=SIGNING_KEY, **settings))
        backend = backend_pb2.Backend(
            name="backends/vendor", base_url=f"http://127.0.0.1:{port}/v1", key_name="vendor", max_in_flight=1
        )
        await proxy.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))
        stubs = await store.stubs()
        for name in ("projects/team-a", "projects/team-b"):
            await create_project(stubs, name)
        yield World(store=store, proxy=proxy, vendor=vendor)


async def test_a_request_arrives_as_it_was_sent_with_the_proxys_key_in_place_of_the_callers(world: World) -> None:
    upload = {
        "content-type": "multipart/form-data; boundary=b",
        "x-secret": "mine",
        "cookie": "a=b",
        "openai-beta": "v2",
    }
    status, body, headers = await world.ask("POST", "/v1/files?purpose=a%26b", data=b"--b--", headers=upload)
    assert (status, body, headers["Content-Type"]) == (200, b"\x00\xff--b--", "audio/mpeg")
    assert headers["X-Request-Id"] == "r-1"
    assert "secret" not in headers.get("Server", "")
    ((method, path, sent, received),) = world.vendor.seen
    assert (method, path, received) == ("POST", "/v1/files?purpose=a%26b", b"--b--")
    assert (sent["authorization"], sent["content-type"]) == (f"Bearer {KEY}", "multipart/form-data; boundary=b")
    assert sent["openai-beta"] == "v2"
    assert not {"x-secret", "cookie"} & sent.keys()

    await world.ask("DELETE", "/v1/files/a%20b")
    assert world.vendor.seen[-1][:2] == ("DELETE", "/v1/files/a%20b")


async def test_events_are_passed_on_as_they_come_and_errors_as_they_are(world: World) -> None:
    status, body, headers = await world.ask("GET", "/v1/files/events")
    assert (status, body) == (200, b"data: one\n\ndata: two\n\n")
    assert "Set-Cookie" not in headers
    status, body, headers = await world.ask("GET", "/v1/files/missing")
    assert (status, json.loads(body)["error"]["code"]) == (404, "missing")
    assert headers["x-fulmen-error-source"] == "backend"


@pytest.mark.parametrize("path", ["large", "moved", "refused"])
async def test_what_a_vendor_may_not_answer_is_a_failure_of_the_backend(world: World, path: str) -> None:
    status, body, _ = await world.ask("GET", f"/v1/files/{path}")
    assert (status, json.loads(body)["error"]["code"]) == (502, "backend_unavailable")
    assert b"sk-" not in body


async def test_a_body_over_the_limit_is_not_passed_on(world: World) -> None:
    status, _, _ = await world.ask("POST", "/v1/files", data=io.BytesIO(b"x" * (MAX_BYTES + 1)))
    assert status == 413
    assert world.vendor.seen == []
    status, _, _ = await world.ask("POST", "/v1/files", data=io.BytesIO(b"x" * (MAX_BYTES - 2)))
    assert (status, len(world.vendor.seen[0][3])) == (200, MAX_BYTES - 2)


async def test_only_who_may_call_models_is_passed_on_and_only_of_the_projects_that_are_named(world: World) -> None:
    assert (await world.ask("GET", "/v1/files", key="sk-anything"))[0] == 401
    assert (await world.ask("GET", "/v1/files", key=world.key(role=Role.READER)))[0] == 403
    assert (await world.ask("GET", "/v1/audio/speech", key=world.key("projects/team-b")))[0] == 404
    assert world.vendor.seen == []
    assert (await world.ask("GET", "/v1/audio/speech"))[0] == 200
    assert (await world.ask("GET", "/v1/audio/speech", key=world.key("projects/*", Role.SERVICE)))[0] == 200


@pytest.mark.parametrize(
    "path", ["/v1/images", "/v1/filesystem", "/v1/files/..%2Fmodels", "/v1/files//x", "/v1/files/"]
)
async def test_other_paths_stay_unknown(world: World, path: str) -> None:
    status, body, _ = await world.ask("GET", path)
    assert (status, json.loads(body)["error"]["code"]) == (404, "path_not_found")
    assert world.vendor.seen == []


async def test_limits_of_the_project_and_the_backend_hold_and_requests_are_counted(world: World) -> None:
    await world.limit(project=CallLimits(requests_per_minute=2))
    assert [(await world.ask("GET", "/v1/files"))[0] for _ in range(3)] == [200, 200, 429]
    await world.proxy.parts.roles["usage-sync"].sync()  # type: ignore[attr-defined]  # the role is one
    stubs = await world.store.stubs()
    request = usage_pb.GetUsageRequest(project="projects/team-a", group_by=usage_pb.USAGE_GROUPING_MODEL)
    groups = (await stubs.usage.GetUsage(request)).groups
    assert [(each.name, each.usage.request_count, each.usage.failure_count) for each in groups] == [("/v1/files", 2, 0)]
    status, body, _ = await world.ask("GET", "/v1/rerank", key=world.key("projects/team-b"))
    assert (status, json.loads(body)["error"]["code"]) == (404, "backend_not_found")


async def test_a_caller_under_a_budget_in_dollars_is_refused_since_the_cost_is_unknown(world: World) -> None:
    await world.limit(budgets=[SpendBudget(subject="project", limit_micros=10**9)])
    status, body, _ = await world.ask("GET", "/v1/files")
    assert (status, json.loads(body)["error"]["code"]) == (403, "price_unknown")
    assert (await world.ask("GET", "/v1/files", key=world.key("projects/team-b")))[0] == 200


async def test_a_caller_that_leaves_ends_the_work_of_the_vendor_and_frees_its_slot(world: World) -> None:
    waiting = asyncio.create_task(world.ask("GET", "/v1/files/slow"))
    async with asyncio.timeout(LIMIT_S):
        while not world.vendor.seen:  # noqa: ASYNC110  # state of a server
            await asyncio.sleep(0.01)
        status, body, _ = await world.ask("GET", "/v1/files")
        assert (status, json.loads(body)["error"]["code"]) == (429, "backend_busy")
        waiting.cancel()
        await world.vendor.left.wait()
        while (await world.ask("GET", "/v1/files"))[0] == 429:
            pass


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/v1/models", "serves /v1/models itself"),
        ("/v1/chat/completions", "serves /v1/chat/completions itself"),
        ("/files", "is not of the form"),
        ("/v1/files/", "is not of the form"),
    ],
)
def test_a_path_that_cannot_be_passed_on_is_refused_at_the_start(path: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        LlmProxySettings(dev_mode=True, pass_on={path: {"backend": "vendor"}})  # type: ignore[dict-item]
