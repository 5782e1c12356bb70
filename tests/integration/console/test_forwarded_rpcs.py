"""Rpcs over HTTP: the answers are those of gRPC, and so are the errors."""

from __future__ import annotations

import asyncio
import gzip

import pytest

import fulmen_console.gateway.forwarding
import fulmen_console.transport.http_app
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.console import ROLLOUTS, Browser, console_of
from tests.support.store.running import StoreHandle, Stubs

PROJECT = "projects/default"


async def test_an_rpc_is_called_with_curl_s_json(browser: Browser, store: StoreHandle) -> None:
    token = store.token(Role.CLIENT)
    created = await browser.call(
        f"{ROLLOUTS}/BatchCreateRollouts",
        {"rollouts": [{"project": PROJECT, "input": "aGVsbG8=", "metadata": {"a": "b"}}]},
        token=token,
    )
    assert created.status == 200
    name = created.body["rollouts"][0]["name"]
    shown = await browser.call(f"{ROLLOUTS}/GetRollout", {"name": name}, token=token)
    assert (shown.body["rollout"]["input"], shown.body["rollout"]["metadata"]) == ("aGVsbG8=", {"a": "b"})
    listed = await browser.call(f"{ROLLOUTS}/ListRollouts", {"project": PROJECT}, token=token)
    assert [one["name"] for one in listed.body["rollouts"]] == [name]


async def test_protobuf_is_answered_with_protobuf(browser: Browser, store: StoreHandle, stubs: Stubs) -> None:
    request = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=PROJECT)])
    name = (await stubs.rollouts.BatchCreateRollouts(request)).rollouts[0].name
    answer = await browser.send(
        "POST",
        f"/{ROLLOUTS}/GetRollout",
        pb.GetRolloutRequest(name=name).SerializeToString(),
        token=store.token(Role.READER),
        content_type="application/proto",
    )
    assert pb.GetRolloutResponse.FromString(answer.body) == await stubs.rollouts.GetRollout(
        pb.GetRolloutRequest(name=name)
    )


async def test_an_error_has_the_code_the_message_and_the_details_of_grpc(browser: Browser, store: StoreHandle) -> None:
    token = store.token(Role.CLIENT)
    missing = await browser.call(
        f"{ROLLOUTS}/GetRollout", {"name": f"{PROJECT}/rollouts/01a22190-b392-7e2e-8c94-a165866c1fdc"}, token=token
    )
    assert (missing.status, missing.body["code"]) == (404, "not_found")
    assert missing.body["message"] == "The rollout does not exist."
    assert [detail["type"] for detail in missing.body["details"]] == ["google.rpc.ErrorInfo"]
    wrong = await browser.call(
        f"{ROLLOUTS}/BatchCreateRollouts",
        {"rollouts": [{"project": PROJECT, "policy": {"maxAttempts": 1000}}]},
        token=token,
    )
    assert (wrong.status, wrong.body["code"]) == (400, "invalid_argument")
    assert "google.rpc.BadRequest" in [detail["type"] for detail in wrong.body["details"]]


async def test_a_misspelt_field_is_an_error(browser: Browser, store: StoreHandle) -> None:
    answer = await browser.call(f"{ROLLOUTS}/ListRollouts", {"fliter": "state=FAILED"}, token=store.token(Role.READER))
    assert (answer.status, answer.body["code"]) == (400, "invalid_argument")
    assert "fliter" in answer.body["message"]


async def test_what_services_call_is_not_there(browser: Browser, store: StoreHandle) -> None:
    for rpc in (
        "fulmen.store.v1.LeaseService/AcquireLeases",
        "fulmen.store.v1.SecretService/GetBackendKeys",
        "fulmen.store.v1.PeerService/Notify",
        "fulmen.llm_proxy.v1.RouteService/ListRoutes",  # this console has no proxy
        "grpc.health.v1.Health/Check",
    ):
        answer = await browser.call(rpc, token=store.token(Role.ADMIN))
        assert (answer.status, answer.body["code"]) == (404, "not_found"), rpc


async def test_a_request_is_bounded(browser: Browser, store: StoreHandle) -> None:
    answer = await browser.send(
        "POST", f"/{ROLLOUTS}/ListRollouts", b"x" * (4 * 1024 * 1024 + 1), token=store.token(Role.READER)
    )
    assert (answer.status, answer.body["code"]) == (429, "resource_exhausted")


async def test_a_stream_begins_at_once_and_shows_that_it_lives(store: StoreHandle, stubs: Stubs) -> None:
    async with console_of(store, heartbeat_s=0.05) as browser:
        token = store.token(Role.READER)
        messages = browser.stream(f"{ROLLOUTS}/WatchRollouts", {"project": PROJECT}, token=token)
        assert [await anext(messages) for _ in range(3)] == [{}, {}, {}]
        created = await stubs.rollouts.BatchCreateRollouts(
            pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=PROJECT)])
        )
        name = created.rollouts[0].name
        await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[name]))
        async with asyncio.timeout(20):
            async for message in messages:
                if message:
                    break
        assert name in str(message)
        await messages.aclose()


async def test_a_stream_ends_after_its_time_and_when_the_console_stops(store: StoreHandle) -> None:
    async with console_of(store, stream_limit_s=0.2) as browser:
        messages = browser.stream(f"{ROLLOUTS}/WatchRollouts", {"project": PROJECT}, token=store.token(Role.READER))
        assert [message async for message in messages] == [{}, {"end": {}}]
    async with console_of(store, drain_grace_s=5.0) as browser:
        lasting = browser.stream(f"{ROLLOUTS}/WatchRollouts", {"project": PROJECT}, token=store.token(Role.READER))
        assert await anext(lasting) == {}
        rest = asyncio.ensure_future(anext(lasting))
    assert await rest == {"end": {}}


async def test_the_error_of_a_stream_is_that_of_its_service(browser: Browser, store: StoreHandle) -> None:
    stream = browser.stream(
        f"{ROLLOUTS}/WatchRollouts", {"project": "projects/other"}, token=store.token(Role.READER, project=PROJECT)
    )
    *_, last = [message async for message in stream]
    assert last["end"]["error"]["code"] == "permission_denied"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"filter":' * 20_000, {}),
        (b"[" * 100_000, {}),
        (b'{"project": "\xff"}', {}),
        (b"\xff\xff", {"content_type": "application/proto"}),
        (gzip.compress(b" " * 50_000_000), {"content_encoding": "gzip"}),
        (b"{}", {"content_encoding": "gzip"}),
        (b"{}", {"connect_timeout_ms": "x"}),
    ],
    ids=["deep objects", "deep lists", "no UTF-8", "no protobuf", "grows", "no gzip", "no timeout"],
)
async def test_a_hostile_body_is_refused_without_the_consoles_own_text(
    browser: Browser, store: StoreHandle, body: bytes, headers: dict[str, str]
) -> None:
    answer = await browser.send("POST", f"/{ROLLOUTS}/ListRollouts", body, token=store.token(Role.READER), **headers)
    assert answer.status in (400, 429), answer.body
    assert answer.body["code"] in ("invalid_argument", "resource_exhausted")
    assert "Traceback" not in str(answer.body)
    assert (await browser.call(f"{ROLLOUTS}/ListRollouts", token=store.token(Role.READER))).status == 200


async def test_half_a_request_ends(browser: Browser, store: StoreHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fulmen_console.transport.http_app, "BODY_LIMIT_S", 0.2)
    host, port = browser.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /{ROLLOUTS}/ListRollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Authorization: Bearer {store.token(Role.READER)}\r\nContent-Length: 100\r\n\r\n{{".encode())
    async with asyncio.timeout(20):
        assert b"HTTP/1.1 4" in await reader.read(65536) or reader.at_eof()
    writer.close()


async def test_an_error_of_the_console_itself_shows_no_text_of_its_own(
    browser: Browser, store: StoreHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> tuple[tuple[str, str], ...]:
        raise RuntimeError("a path of this machine")

    monkeypatch.setattr(fulmen_console.gateway.forwarding, "_metadata", broken)
    token = store.token(Role.READER)
    answer = await browser.call(f"{ROLLOUTS}/ListRollouts", token=token)
    assert (answer.status, answer.body["code"]) == (500, "internal")
    stream = browser.stream(f"{ROLLOUTS}/WatchRollouts", {}, token=token)
    *_, last = [message async for message in stream]
    assert last["end"]["error"]["code"] == "internal"
    assert "machine" not in f"{answer.body}{last}"
