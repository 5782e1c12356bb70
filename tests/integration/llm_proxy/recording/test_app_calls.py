"""Calls of an app are recorded by their route's setting, redacted, in their project, and no caller notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import (
    completion_service_pb2,
    completion_service_pb2_grpc,
    route_pb2,
    route_service_pb2,
)
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.pair import a_pair, put, stream
from tests.support.llm_proxy.waits import eventually
from tests.support.store.running import SIGNING_KEY, StoreHandle, create_project, running_store

SECRETS = ("alice@example.org", "sk-abcdefghijklmnopqrstuvwx", "4111 1111 1111 1111")
EVERYTHING = route_pb2.Recording(sample_rate=1.0)


@pytest.fixture
async def real_store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store on PostgreSQL."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def proxy(real_store: StoreHandle, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy of that store, whose route records everything."""
    async with running_proxy(real_store.target, backend_url=backend.url, signing_key=SIGNING_KEY) as running:
        await put(running, target("one"), recording=EVERYTHING)
        yield running


async def recorded(store: StoreHandle, count: int, project: str = "projects/default") -> list[call_pb2.RecordedCall]:
    """Waits for so many recorded calls of a project; returns them, oldest first."""
    stubs = await store.stubs()
    found: list[call_pb2.RecordedCall] = []

    async def arrived() -> bool:
        page = await stubs.calls.ListCalls(pb.ListCallsRequest(project=project, with_content=True))
        found[:] = sorted(page.calls, key=lambda call: call.create_time.ToNanoseconds())
        return len(found) >= count

    await eventually(arrived)
    return found


def app_key(proxy: RunningProxy, project: str = "projects/default") -> str:
    return proxy.signer.issue(Role.CLIENT, subject="app", ttl_s=600, project=project)


async def test_a_conversation_of_an_app_is_recorded_redacted_and_put_together(
    proxy: RunningProxy, real_store: StoreHandle
) -> None:
    key, messages = app_key(proxy), [{"role": "user", "content": f"I am {SECRETS[0]}, \0 🍋, my key is {SECRETS[1]}"}]
    headers = {"Authorization": f"Bearer {key}", "Cookie": "session=secret-cookie", "X-Api-Key": ""}
    for more in ("", f"Pay with {SECRETS[2]}"):
        if more:
            messages.append({"role": "user", "content": more})
        body = {"model": MODEL, "messages": messages, "tools": [], "user": "private-user"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            said = (await answer.json())["choices"][0]["message"]
        assert said["content"].startswith("You said: ")  # The app has the answer as it was.
        messages.append(said)
    first, second = await recorded(real_store, 2)
    assert first.conversation == second.conversation
    assert (first.model, first.backend, first.policy, first.policy_version) == (MODEL, "backends/one", "arithmetic", 1)
    assert (second.http_status, second.error, second.finish_reason, second.message_count) == (200, "", "stop", 3)
    assert second.prompt_token_count > first.prompt_token_count > 0
    kept = json.loads(second.content.messages_json)
    assert kept[0]["content"] == "I am [email], \0 🍋, my key is [api_key]"
    assert kept[1]["content"] == "You said: I am [email], \0 🍋, my key is [api_key]"
    assert json.loads(second.content.answer_json)["content"] == "You said: Pay with [card_number]"
    everything = first.SerializeToString() + second.SerializeToString()
    assert not [word for word in (*SECRETS, key, "secret-cookie", "private-user") if word.encode() in everything]


async def test_calls_of_attempts_and_of_routes_that_do_not_record_are_not_recorded(
    proxy: RunningProxy, real_store: StoreHandle
) -> None:
    await put(proxy, target("one"), model="silent")
    _, attempt_key = proxy.attempt()
    await proxy.chat(attempt_key, "of an attempt")
    assert (await proxy.chat(app_key(proxy), "silent", model="silent"))[0] == 200
    assert (await proxy.chat(app_key(proxy), "of the app"))[0] == 200
    (call,) = await recorded(real_store, 1)
    assert b"of the app" in call.content.messages_json


async def test_a_call_belongs_to_the_project_of_its_caller(proxy: RunningProxy, real_store: StoreHandle) -> None:
    await create_project(await real_store.stubs(), "projects/other")
    await proxy.chat(app_key(proxy, "projects/other"), "theirs")
    await proxy.chat(app_key(proxy), "mine")
    assert b"mine" in (await recorded(real_store, 1))[0].content.messages_json
    assert b"theirs" in (await recorded(real_store, 1, "projects/other"))[0].content.messages_json


@pytest.mark.parametrize("path", ["/messages", "/responses"])
async def test_other_apis_are_recorded_in_the_form_of_the_chat_api(
    proxy: RunningProxy, real_store: StoreHandle, path: str
) -> None:
    said = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": said, "system": "Be kind."}
    if path == "/responses":
        body = {"model": MODEL, "input": said, "instructions": "Be kind."}
    headers = {"Authorization": f"Bearer {app_key(proxy)}", "x-fulmen-conversation": "chat-7"}
    async with proxy.http.post(f"{proxy.url}{path}", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    (call,) = await recorded(real_store, 1)
    assert json.loads(call.content.messages_json) == [{"role": "system", "content": "Be kind."}, *said]
    assert json.loads(call.content.answer_json)["content"] == "You said: Hello"
    assert call.finish_reason == "stop"
    assert call.conversation == "projects/default/conversations/chat-7"


async def test_a_stream_is_recorded_whole_and_one_that_breaks_as_far_as_it_came(
    proxy: RunningProxy, real_store: StoreHandle, backend: Backend
) -> None:
    status, _ = await stream(proxy, app_key(proxy))
    assert status == 200
    backend.switches.cut_after_events = 3
    await stream(proxy, app_key(proxy))
    whole, broken = await recorded(real_store, 2)
    assert json.loads(whole.content.answer_json)["content"] == "You said: x"
    assert whole.error == ""
    assert broken.error


async def test_a_refusal_is_recorded_without_an_answer(
    proxy: RunningProxy, real_store: StoreHandle, backend: Backend
) -> None:
    backend.switches.refusals.append(400)
    assert (await proxy.chat(app_key(proxy)))[0] == 400
    (call,) = await recorded(real_store, 1)
    assert (call.http_status, call.error, call.content.answer_json) == (400, "backend_400", b"")


async def test_a_conversation_is_sampled_as_a_whole(proxy: RunningProxy, real_store: StoreHandle) -> None:
    await put(proxy, target("one"), recording=route_pb2.Recording(sample_rate=0.5))
    key = app_key(proxy)

    async def calls_of(conversation: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": conversation}]}
        headers = {"Authorization": f"Bearer {key}", "x-fulmen-conversation": conversation}
        for _ in range(3):
            async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
                await answer.read()

    await asyncio.gather(*(calls_of(f"c{number}") for number in range(20)))
    await put(proxy, target("one"), recording=EVERYTHING)
    await calls_of("last")
    stubs = await real_store.stubs()

    async def last_arrived() -> bool:
        page = await stubs.calls.ListConversations(pb.ListConversationsRequest(filter="conversation = last"))
        return any(each.call_count == 3 for each in page.conversations)

    await eventually(last_arrived)
    counts = (await stubs.calls.ListConversations(pb.ListConversationsRequest())).conversations
    assert {each.call_count for each in counts} == {3}
    assert 1 < len(counts) < 21


async def test_a_call_that_is_too_large_takes_too_long_or_is_odd_is_answered_dropped_and_counted(
    proxy: RunningProxy, real_store: StoreHandle
) -> None:
    key = app_key(proxy)
    assert (await proxy.chat(key, "x" * 600_000))[0] == 200
    slow = route_pb2.RedactionPattern(name="slow", expression="(a+)+$")
    await put(proxy, target("one"), recording=route_pb2.Recording(sample_rate=1.0, patterns=[slow]))
    assert (await proxy.chat(key, "a" * 5000 + "b"))[0] == 200
    assert (await proxy.chat(key, "fine"))[0] == 200
    (call,) = await recorded(real_store, 1)
    assert b"fine" in call.content.messages_json
    dropped = {
        reason: proxy.metric("recorded_calls_dropped_total", reason=reason)
        for reason in ("too_large", "redaction_timeout")
    }
    assert dropped == {"too_large": 1, "redaction_timeout": 1}
    assert proxy.metric("recorded_calls_total") == 1


async def test_calls_made_while_the_store_is_away_are_recorded_when_it_is_back(
    backend: Backend, database_url: str
) -> None:
    async with AsyncExitStack() as proxies:
        async with running_store(database_url) as store:
            port = store.port
            proxy = await proxies.enter_async_context(
                running_proxy(store.target, backend_url=backend.url, signing_key=SIGNING_KEY)
            )
            await put(proxy, target("one"), recording=EVERYTHING)
            assert (await proxy.chat(app_key(proxy), "before"))[0] == 200
            await recorded(store, 1)
        for number in range(3):
            assert (await proxy.chat(app_key(proxy), f"away {number}"))[0] == 200
        async with running_store(database_url, port=port) as store:
            assert len(await recorded(store, 4)) == 4
            assert proxy.metric("recorded_calls_total") == 4


async def test_without_a_store_calls_are_answered_and_the_buffer_stays_bounded(store: FakeStore) -> None:
    async with a_pair(store, "answer", recording_buffer_bytes=100_000, route={"recording": EVERYTHING}) as (
        proxy,
        _,
        _,
    ):
        key = app_key(proxy)
        for _ in range(20):
            assert (await proxy.chat(key, "x" * 20_000))[0] == 200
        assert (proxy.metric("recording_buffer_bytes") or 0) <= 100_000
        total = sum(
            proxy.metric("recorded_calls_dropped_total", reason=reason) or 0 for reason in ("buffer_full", "rejected")
        )
        assert total > 0


async def test_a_rollback_never_begins_to_record_again(proxy: RunningProxy) -> None:
    await put(proxy, target("one"))  # recording is off
    await put(proxy, target("one", weight=7))
    recorded_version = 2
    for version in (0, recorded_version):
        request = route_service_pb2.RollbackRouteRequest(name=f"routes/{MODEL}", version=version)
        assert not (await proxy.routes.RollbackRoute(request)).route.HasField("recording")
    await put(proxy, target("one"), recording=EVERYTHING)
    request = route_service_pb2.RollbackRouteRequest(name=f"routes/{MODEL}")
    assert (await proxy.routes.RollbackRoute(request)).route.recording == EVERYTHING


async def test_a_call_over_grpc_names_its_conversation_too(proxy: RunningProxy, real_store: StoreHandle) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    for conversation in ("chat-9", "not an id\0"):
        request = completion_service_pb2.CompleteRequest(
            path="/v1/chat/completions", body_json=body, conversation=conversation
        )
        stub = completion_service_pb2_grpc.CompletionServiceStub(proxy.channel)
        assert (await stub.Complete(request)).http_status == 200
    named, other = await recorded(real_store, 2)
    assert named.conversation.endswith("/chat-9")
    assert other.conversation != named.conversation


async def test_a_recording_that_cannot_be_one_is_refused_with_every_problem(proxy: RunningProxy) -> None:
    bad = route_pb2.Recording(
        sample_rate=1.5,
        redact=["email", "none", "shoe_size"],
        patterns=[route_pb2.RedactionPattern(name="Bad", expression="(")],
        retention=Duration(seconds=1),
    )
    with pytest.raises(ArgumentInvalid) as refused:
        await put(proxy, target("one"), recording=bad)
    fields = {violation.field.removeprefix("route.recording.") for violation in refused.value.violations}
    assert fields == {"sample_rate", "redact", "redact[2]", "patterns[0].name", "patterns[0].expression", "retention"}
