"""Responses of models whose backend stores none are kept in the store, and continued by any proxy, by their owner alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from fulmen.ids import uuid7
from fulmen.llm_proxy.v1 import route_pb2
from fulmen.store.v1 import call_service_pb2, lease_pb2, span_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_llm_proxy.calls.responses import kept_responses
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore, batch_of
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.pair import put
from tests.support.llm_proxy.vendor_world import NO_TLS
from tests.support.llm_proxy.waits import eventually
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project, running_store

OTHER = "projects/other"
TOOL: Any = {"type": "function", "name": "lookup", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture
async def real_store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store on PostgreSQL."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def stubs(real_store: StoreHandle) -> Stubs:
    """Returns an administrator's stubs."""
    return await real_store.stubs()


@pytest.fixture
async def proxy(real_store: StoreHandle, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy of that store."""
    async with running_proxy(real_store.target, backend_url=backend.url, signing_key=SIGNING_KEY) as running:
        yield running


@pytest.fixture
async def replica(real_store: StoreHandle, proxy: RunningProxy) -> AsyncIterator[RunningProxy]:
    """Yields another proxy of that store."""
    async with running_proxy(real_store.target, signing_key=SIGNING_KEY) as running:
        await running.loaded()
        yield running


def app_key(proxy: RunningProxy, project: str = "projects/default") -> str:
    return proxy.signer.issue(Role.CLIENT, subject="app", ttl_s=600, project=project)


def client(proxy: RunningProxy, key: str = "") -> AsyncOpenAI:
    """Returns OpenAI's own client, of an app unless a key is given."""
    http = DefaultAsyncHttpxClient(verify=NO_TLS)
    return AsyncOpenAI(base_url=proxy.url, api_key=key or app_key(proxy), max_retries=0, http_client=http)


async def leased(stubs: Stubs, count: int = 1) -> list[lease_pb2.Assignment]:
    await create(stubs, count)
    return await (await Runner(stubs).open()).take(count)


async def said_by(agent: AsyncOpenAI, *, stream: bool = False, **fields: Any) -> Any:
    """Returns the response, whole or at the end of its stream, all of whose events have its id."""
    if not stream:
        return await agent.responses.create(model=MODEL, **fields)
    async with agent.responses.stream(model=MODEL, **fields) as events:
        seen = [event async for event in events]
        final = await events.get_final_response()
    assert {event.response.id for event in seen if hasattr(event, "response")} == {final.id}
    return final


async def records_of(stubs: Stubs, proxy: RunningProxy, attempt: str) -> list[ModelCallRecord]:
    assert (await proxy.flush(attempt)).flushed
    stream = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[attempt]))
    chunks = [chunk async for message in stream for chunk in message.chunks]
    spans = sorted((span for chunk in chunks for span in batch_of(chunk).spans), key=lambda span: span.otlp_span)
    return sorted(
        (ModelCallRecord.FromString(span.model_call) for span in spans), key=lambda each: len(each.prompt_token_ids)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_another_proxy_and_the_model_sees_all_of_it(
    proxy: RunningProxy, replica: RunningProxy, backend: Backend, stream: bool
) -> None:
    key = app_key(proxy)
    async with client(proxy, key) as here, client(replica, key) as there:
        first = await said_by(here, stream=stream, input="one", instructions="Be brief.")
        assert (first.store, first.previous_response_id, first.output_text) == (True, None, "You said: one")
        second = await said_by(there, stream=stream, input="two", previous_response_id=first.id)
        assert (second.store, second.previous_response_id) == (True, first.id)
        third = await said_by(here, stream=stream, input="three", previous_response_id=second.id, instructions="Hm.")
    assert len({first.id, second.id, third.id}) == 3
    # Instructions are those of the call alone, as at OpenAI.
    assert [(each["role"], each["content"]) for each in backend.received[-1].body["messages"]] == [
        ("system", "Hm."), ("user", "one"), ("assistant", "You said: one"), ("user", "two"),
        ("assistant", "You said: two"), ("user", "three"),
    ]  # fmt: skip


async def test_a_conversation_may_branch_and_tools_are_answered(proxy: RunningProxy, backend: Backend) -> None:
    async with client(proxy) as agent:
        asked = await said_by(agent, input="look it up", tools=[TOOL])
        [call] = asked.output
        results = [
            await said_by(
                agent,
                input=[{"type": "function_call_output", "call_id": call.call_id, "output": text}],
                previous_response_id=asked.id,
            )
            for text in ("sun", "rain")
        ]
    assert all(each.previous_response_id == asked.id for each in results)
    assert [[turn["role"] for turn in each.body["messages"]] for each in backend.received[-2:]] == [
        ["user", "assistant", "tool"]
    ] * 2
    assert [each.body["messages"][-1]["content"] for each in backend.received[-2:]] == ["sun", "rain"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_capture_of_a_continued_call_is_that_of_the_whole_conversation(
    proxy: RunningProxy, stubs: Stubs, stream: bool
) -> None:
    continuing, sending = await leased(stubs, 2)
    async with client(proxy, continuing.attempt_key) as agent:
        first = await said_by(agent, stream=stream, input="one")
        await said_by(
            agent,
            stream=stream,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "two"}]}],
            previous_response_id=first.id,
        )
    async with client(proxy, sending.attempt_key) as agent:
        first = await said_by(agent, stream=stream, input="one", store=False)
        spoken = [item.model_dump(exclude_none=True) for item in first.output]
        whole: Any = [{"role": "user", "content": "one"}, *spoken, {"role": "user", "content": "two"}]
        await said_by(agent, stream=stream, input=whole, store=False)
    continued = await records_of(stubs, proxy, continuing.attempt)
    sent = await records_of(stubs, proxy, sending.attempt)
    assert [(each.prompt_token_ids, each.completion_token_ids, each.completion_logprobs) for each in continued] == [
        (each.prompt_token_ids, each.completion_token_ids, each.completion_logprobs) for each in sent
    ]
    assert [each.request_json for each in continued] == [each.request_json for each in sent]
    assert all(each.usable for each in continued)
    assert len(continued) == 2


async def test_what_is_not_to_be_stored_is_not(proxy: RunningProxy, real_store: StoreHandle, database_url: str) -> None:
    async with client(proxy) as agent:
        unstored = await said_by(agent, input="one", store=False)
        assert unstored.store is False
        with pytest.raises(openai.BadRequestError) as refused:
            await said_by(agent, input="two", previous_response_id=unstored.id)
        stored = await said_by(agent, input="one")
        # It may continue without being stored itself.
        last = await said_by(agent, input="two", previous_response_id=stored.id, store=False)
        assert (last.store, last.previous_response_id) == (False, stored.id)
        with pytest.raises(openai.NotFoundError):
            await agent.responses.retrieve(last.id)
    assert proxy.metric("stored_responses_total", outcome="stored") == 1
    error: Any = refused.value.body
    assert (error["code"], error["param"], error["type"]) == (
        "previous_response_not_found", "previous_response_id", "invalid_request_error",
    )  # fmt: skip


@pytest.mark.parametrize(("stored_responses", "kept"), [("if_true", [False, True]), ("never", [False, False])])
async def test_the_operator_says_which_responses_are_stored(
    real_store: StoreHandle, backend: Backend, stored_responses: str, kept: list[bool]
) -> None:
    async with (
        running_proxy(
            real_store.target, backend_url=backend.url, signing_key=SIGNING_KEY, stored_responses=stored_responses
        ) as proxy,
        client(proxy) as agent,
    ):
        found = [await said_by(agent, input="one", **fields) for fields in ({}, {"store": True})]
        assert [each.store for each in found] == kept


async def test_a_stored_response_is_read_listed_and_deleted(proxy: RunningProxy, replica: RunningProxy) -> None:
    key = app_key(proxy)
    async with client(proxy, key) as agent, client(replica, key) as there:
        first = await said_by(agent, input="one")
        second = await said_by(
            agent, input=[{"role": "user", "content": "two"}], previous_response_id=first.id, metadata={"a": "b"}
        )
        found = await there.responses.retrieve(second.id)
        assert found == second
        listed = [item async for item in there.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [(item.type, item.role, item.content[0].text) for item in listed] == [  # type: ignore[union-attr]
            ("message", "user", "one"), ("message", "assistant", "You said: one"), ("message", "user", "two"),
        ]  # fmt: skip
        page = await there.responses.input_items.list(second.id, limit=2)
        assert [item.id for item in page.data] == [item.id for item in listed[:0:-1]]
        assert page.has_more
        [own] = (await there.responses.input_items.list(first.id)).data
        assert own.id == listed[0].id
        with pytest.raises(openai.BadRequestError) as refused:
            await there.responses.input_items.list(second.id, limit=101, after="x", extra_query={"order": "up"})
        for name in ("limit", "after", "order"):
            assert name in refused.value.message
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            await agent.responses.retrieve(second.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="background"):
            await agent.responses.cancel(second.id)
        await there.responses.delete(first.id)
        for gone in (agent.responses.retrieve, agent.responses.delete, agent.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await gone(first.id)
        # The one that continues it is there, and its conversation has lost its beginning.
        assert (await agent.responses.retrieve(second.id)).id == second.id
        with pytest.raises(openai.BadRequestError) as lost:
            await said_by(agent, input="three", previous_response_id=second.id)
    assert lost.value.code == "previous_response_not_found"


async def test_a_response_is_its_attempts_or_its_projects_and_unknown_to_all_others(
    proxy: RunningProxy, stubs: Stubs
) -> None:
    await create_project(stubs, OTHER)
    one, two = await leased(stubs, 2)
    async with client(proxy, one.attempt_key) as agent:
        of_attempt = await said_by(agent, input="one")
    async with client(proxy) as app:
        of_app = await said_by(app, input="one")
        assert (await app.responses.retrieve(of_attempt.id)).id == of_attempt.id
    for key, hidden in (
        (two.attempt_key, of_attempt.id), (one.attempt_key, of_app.id),
        (app_key(proxy, OTHER), of_app.id), (app_key(proxy, OTHER), of_attempt.id),
    ):  # fmt: skip
        async with client(proxy, key) as stranger:
            texts = set()
            for asked in (hidden, f"resp_{uuid7().hex}"):
                for ask in (
                    stranger.responses.retrieve, stranger.responses.delete, stranger.responses.input_items.list,
                ):  # fmt: skip
                    with pytest.raises(openai.NotFoundError) as found:
                        await ask(asked)
                    texts.add((found.value.code, found.value.message.replace(asked, "ID")))
            assert len(texts) == 1
            if key == two.attempt_key:
                with pytest.raises(openai.BadRequestError) as refused:
                    await said_by(stranger, input="two", previous_response_id=hidden)
                assert refused.value.code == "previous_response_not_found"
    async with client(proxy) as app:
        assert (await app.responses.retrieve(of_app.id)).id == of_app.id


async def test_a_conversation_that_is_too_long_is_refused_and_one_that_is_too_large_not_stored(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_responses, "MAX_DEPTH", 2)
    async with client(proxy) as agent:
        first = await said_by(agent, input="one")
        second = await said_by(agent, input="two", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="2 responses") as refused:
            await said_by(agent, input="three", previous_response_id=second.id)
        assert refused.value.code == "stored_response_too_large"
        last = await said_by(agent, input="three", previous_response_id=second.id, store=False)
        assert last.output_text == "You said: three"
        monkeypatch.setattr(kept_responses, "MAX_CHAIN_BYTES", 100)
        with pytest.raises(openai.BadRequestError):
            await said_by(agent, input="two", previous_response_id=first.id)
        monkeypatch.setattr(kept_responses, "MAX_CONTENT_BYTES", 1000)
        large = await said_by(agent, input="x" * 900)
        assert large.store is False
        assert (await said_by(agent, input="x" * 1100)).store is False
        with pytest.raises(openai.BadRequestError):
            await said_by(agent, input="x" * 1100, store=True)
    assert proxy.metric("stored_responses_total", outcome="too_large") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_is_away_costs_the_conversation_and_never_the_answer(
    store: FakeStore, proxy: RunningProxy, real_store: StoreHandle, backend: Backend, stream: bool
) -> None:
    async with client(proxy) as agent:
        first = await said_by(agent, stream=stream, input="one")
        await real_store.parts.server.server.stop(grace=0)
        second = await said_by(agent, stream=stream, input="one")
        assert (second.output_text, second.store) == ("You said: one", False)
        with pytest.raises(openai.InternalServerError) as unavailable:
            await said_by(agent, input="two", previous_response_id=first.id)
        assert unavailable.value.status_code in (503, 504)
    assert proxy.metric("stored_responses_total", outcome="failed") == 1
    # A store of an earlier version knows nothing of responses.
    async with running_proxy(store.target, backend_url=backend.url) as older, client(older) as agent:
        third = await said_by(agent, stream=stream, input="one")
        assert (third.output_text, third.store) == ("You said: one", False)
        with pytest.raises(openai.BadRequestError) as refused:
            await said_by(agent, input="two", previous_response_id=third.id)
        assert refused.value.code == "previous_response_not_found"


async def test_an_answer_from_the_cache_is_a_response_of_its_own(proxy: RunningProxy, backend: Backend) -> None:
    await put(proxy, target("one", policy="", version=0), cached=True)
    async with client(proxy) as agent:
        found = [await said_by(agent, input="one", temperature=0) for _ in range(2)]
        assert len(backend.received) == 1
        assert found[0].id != found[1].id
        ends = [await said_by(agent, input="two", previous_response_id=each.id, temperature=0) for each in found]
    assert [each.output_text for each in ends] == ["You said: two"] * 2
    assert len(backend.received) == 2


async def test_a_continued_call_of_an_app_is_recorded_with_what_was_said_before(
    proxy: RunningProxy, stubs: Stubs
) -> None:
    await put(proxy, target("one"), recording=route_pb2.Recording(sample_rate=1.0))
    async with client(proxy) as agent:
        first = await said_by(agent, input="one")
        await said_by(agent, input="two", previous_response_id=first.id)
    found: Any = []

    async def arrived() -> bool:
        page = await stubs.calls.ListCalls(call_service_pb2.ListCallsRequest())
        found[:] = page.calls
        return len(found) == 2

    await eventually(arrived)
    assert sorted(call.message_count for call in found) == [1, 3]
    assert len({call.conversation for call in found}) == 1


async def test_memory_of_conversations_counts_as_that_of_requests(
    real_store: StoreHandle, proxy: RunningProxy, backend: Backend
) -> None:
    async with client(proxy) as agent:
        first = await said_by(agent, input="x" * 30_000)
    async with running_proxy(
        real_store.target, signing_key=SIGNING_KEY, max_request_bytes=40_000, request_buffer_bytes=40_000
    ) as small:
        await small.loaded()
        async with client(small, app_key(proxy)) as agent:
            for _ in range(3):
                with pytest.raises(openai.RateLimitError) as refused:
                    await said_by(agent, input="y", previous_response_id=first.id)
                assert refused.value.code == "too_many_bytes"
            assert (await said_by(agent, input="y" * 30_000)).store is True
