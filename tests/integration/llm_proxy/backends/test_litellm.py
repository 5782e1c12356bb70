"""Vendors with APIs of their own, called through LiteLLM in its own environment: the answers, the failures, and what stays shut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from google.protobuf.duration_pb2 import Duration
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2 import RegisterBackendRequest
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceStub
from fulmen.rpc.channel import open_channel
from tests.support.llm_proxy.fake_store import SIGNING_KEY, FakeStore
from tests.support.llm_proxy.litellm_world import (
    KEYS,
    VENDORS,
    LitellmWorld,
    lead,
    litellm_python,
    litellm_world,
    register,
    workers,
)
from tests.support.llm_proxy.proxy_process import proxy_process
from tests.support.llm_proxy.vendor_world import NO_TLS
from tests.support.llm_proxy.vendors.native import (
    ADDENDS,
    EMBEDDING,
    PIECES,
    PROMPT_TOKENS,
    TOKENS,
    Fault,
    GeminiVendor,
)
from tests.support.llm_proxy.waits import eventually

pytestmark = [
    pytest.mark.long(short=True),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("litellm"),
    pytest.mark.timeout(240),  # the processes import LiteLLM
]

LIMIT_S = 120.0
POLL_S = 0.1
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: list[Any] = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world() -> AsyncIterator[LitellmWorld]:
    """Yields a proxy before three vendors, whose processes take calls."""
    async with FakeStore() as store, litellm_world(store) as running:
        await asyncio.gather(*(running.proxy.chat(running.key(), model=name) for name in VENDORS))
        yield running
    assert not workers()


@pytest.fixture(autouse=True)
def _usual(request: pytest.FixtureRequest) -> None:
    """Sets the vendors' switches back."""
    if "world" in request.fixturenames:
        running: LitellmWorld = request.getfixturevalue("world")
        for vendor in map(running.vendor, VENDORS):
            vendor.faults.clear()
            vendor.hangs, vendor.padding = False, ""
            vendor.pause.set()
            vendor.arrived.clear()
            vendor.left.clear()


def agent(world: LitellmWorld, key: str = "") -> AsyncOpenAI:
    """Returns OpenAI's own client; all it knows of the proxy is the address."""
    client = DefaultAsyncHttpxClient(verify=NO_TLS)
    return AsyncOpenAI(api_key=key or world.key(), base_url=world.proxy.url, max_retries=0, http_client=client)


@pytest.mark.parametrize("name", VENDORS)
async def test_an_agent_of_openais_api_is_answered_by_each_vendor(world: LitellmWorld, name: str) -> None:
    async with agent(world) as client:
        whole = await client.chat.completions.create(model=name, messages=HELLO, temperature=0.5)
        stream = await client.chat.completions.create(
            model=name, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "".join(PIECES)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (PROMPT_TOKENS, TOKENS)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [text for text in texts if text] == list(PIECES)
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1
    if name != "cohere":  # of its streams LiteLLM does not read the vendor's count, and counts by itself
        assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (PROMPT_TOKENS, TOKENS)


@pytest.mark.parametrize("name", VENDORS)
@pytest.mark.parametrize("streams", [False, True])
async def test_tools_are_called_and_their_results_returned(world: LitellmWorld, name: str, streams: bool) -> None:
    async with agent(world) as client:
        if streams:
            stream = await client.chat.completions.create(model=name, messages=HELLO, tools=ADD, stream=True)
            deltas = [
                call async for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()
            ]
            parts = [each.function for each in deltas if each.function is not None]
            called_id = next(each.id for each in deltas if each.id)
            called_name = next(each.name for each in parts if each.name)
            arguments = "".join(each.arguments or "" for each in parts)
        else:
            asked = await client.chat.completions.create(model=name, messages=HELLO, tools=ADD)
            assert asked.choices[0].finish_reason == "tool_calls"
            (call,) = asked.choices[0].message.tool_calls or ()
            assert call.type == "function"
            called_id, called_name, arguments = call.id, call.function.name, call.function.arguments
        assert (called_name, json.loads(arguments)) == ("add", ADDENDS)
        function = {"name": called_name, "arguments": arguments}
        turns: list[Any] = [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": called_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": called_id, "content": "3"},
        ]
        answer = await client.chat.completions.create(model=name, messages=turns, tools=ADD)
    assert answer.choices[0].message.content == "".join(PIECES)


async def test_an_agent_of_anthropics_api_is_answered_too(world: LitellmWorld) -> None:
    http = AnthropicHttpxClient(verify=NO_TLS)
    base = world.proxy.url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=base, api_key=world.key(), max_retries=0, http_client=http) as client:
        answer = await client.messages.create(model="gemini", max_tokens=9, messages=HELLO)
    assert [block.text for block in answer.content if block.type == "text"] == ["".join(PIECES)]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (PROMPT_TOKENS, TOKENS)


@pytest.mark.parametrize("name", ["cohere", "gemini"])
async def test_texts_are_embedded(world: LitellmWorld, name: str) -> None:
    async with agent(world) as client:
        answer = await client.embeddings.create(model=name, input=["a", "b"], encoding_format="float")
    assert [each.embedding for each in answer.data] == [EMBEDDING, EMBEDDING]


async def test_each_vendor_gets_its_own_key_and_nothing_else_of_the_caller(world: LitellmWorld) -> None:
    attempt = world.key()
    for name in VENDORS:
        await world.proxy.chat(attempt, model=name)
    assert world.vertex_ai.received[-1].headers["Authorization"] == f"Bearer {world.vertex_ai.TOKEN}"
    sent = {name: world.vendor(name).received[-1].headers for name in VENDORS}
    assert sent["gemini"]["x-goog-api-key"] == KEYS["gemini"]
    assert sent["cohere"]["Authorization"].lower() == f"bearer {KEYS['cohere']}"
    assert "AWS4-HMAC-SHA256 Credential=AKIAOFTHETESTS/" in sent["bedrock"]["Authorization"]
    for name, headers in sent.items():
        others = [key for other, key in KEYS.items() if other != name] + [attempt, "aws-secret-of-the-tests"]
        assert not [key for key in others if key in str(headers)]


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 503])
async def test_a_refusal_is_passed_on_in_the_vendors_words_without_the_key(
    world: LitellmWorld, name: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "aws-secret-of-the-tests" if name == "bedrock" else KEYS[name]
    fault = Fault(status=status, message=f"No: {secret} is known.", headers={"Retry-After": "7"})
    world.vendor(name).faults.append(fault)
    async with agent(world) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model=name, messages=HELLO)
    error = caught.value
    if status in (401, 403):  # the proxy's key, not the caller's
        assert (error.status_code, error.response.json()["error"]["code"]) == (502, "backend_unavailable")
    else:
        assert (error.status_code, error.response.json()["error"]["message"]) == (status, "No: *** is known.")
    if status == 429:
        assert error.response.headers["Retry-After"] == "7"
    said = error.response.text.lower()
    assert "litellm" not in said
    assert "traceback" not in said
    printed = "".join(capfd.readouterr())
    assert secret not in printed


async def test_a_caller_that_leaves_ends_the_vendors_work(world: LitellmWorld) -> None:
    world.gemini.hangs = True
    call = asyncio.create_task(world.proxy.chat(world.key(), model="gemini"))
    async with asyncio.timeout(LIMIT_S):
        await world.gemini.arrived.wait()
        call.cancel()
        await world.gemini.left.wait()


async def test_a_vendor_that_hangs_is_given_up_at_the_routes_deadline(world: LitellmWorld) -> None:
    targets = [route_pb2.RouteTarget(backend="backends/gemini", backend_model="any", weight=1)]
    route = route_pb2.Route(name="routes/hasty", targets=targets, deadline=Duration(seconds=1))
    await world.proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    world.gemini.hangs = True
    status, answer = await world.proxy.chat(world.key(), model="hasty")
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    async with asyncio.timeout(LIMIT_S):
        await world.gemini.left.wait()


async def test_an_answer_that_is_too_large_is_not_read_to_its_end(world: LitellmWorld) -> None:
    world.gemini.padding = "x" * 2 * 1024 * 1024
    status, answer = await world.proxy.chat(world.key(), model="gemini")
    assert status == 502
    assert "more bytes" in answer["error"]["message"]


async def test_parameters_that_the_vendor_does_not_take_are_named_or_left_out(world: LitellmWorld) -> None:
    unknown = {"logit_bias": {"1": 1}}
    status, answer = await world.proxy.chat(world.key(), model="gemini", **unknown)
    assert (status, "logit_bias" in answer["error"]["message"]) == (400, True)
    await register(world.proxy, "gemini", world.gemini.url, backend="lenient", drop_params=True)
    await lead(world.proxy, "lenient", "lenient")
    status, answer = await world.proxy.chat(world.key(), model="lenient", **unknown)
    assert status == 200
    assert "logit" not in str(world.gemini.received[-1].body)


async def test_no_request_leads_to_another_address_or_to_litellms_own_arguments(world: LitellmWorld) -> None:
    async with GeminiVendor() as stranger:
        own = {"api_base": stranger.url, "api_key": "x", "vertex_credentials": "/etc/passwd", "mock_response": "fake"}
        status, answer = await world.proxy.chat(world.key(), model="gemini", **own)
        assert status == 400
        assert all(name in answer["error"]["message"] for name in own)
        for url in (f"{stranger.url}/a.png", "https://example.com/a.png", "file:///etc/hostname", "/etc/hostname"):
            picture = [{"type": "image_url", "image_url": {"url": url}}]
            body = {"model": "gemini", "messages": [{"role": "user", "content": picture}]}
            headers = {"Authorization": f"Bearer {world.key()}"}
            async with world.proxy.http.post(
                f"{world.proxy.url}/chat/completions", json=body, headers=headers
            ) as refused:
                assert refused.status == 400, await refused.text()
        assert not stranger.arrived.is_set()


async def test_a_key_is_not_given_to_the_process_of_another_host(world: LitellmWorld) -> None:
    await register(world.proxy, "gemini", world.gemini.url.replace("127.0.0.1", "localhost"), backend="elsewhere")
    await lead(world.proxy, "elsewhere", "elsewhere")
    status, answer = await world.proxy.chat(world.key(), model="elsewhere")
    assert status == 502
    assert "may not be sent;" in answer["error"]["message"]
    assert not world.gemini.arrived.is_set()
    await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/elsewhere"))


async def test_no_process_has_a_key_in_its_environment_or_arguments(world: LitellmWorld) -> None:
    found = [*workers()]
    assert len(found) >= len(VENDORS)
    for process in found:
        shown = " ".join([*process.cmdline(), *process.environ().values()])
        assert not [key for key in (*KEYS.values(), world.key()) if key in shown]
        assert not {name for name in process.environ() if name.startswith("FULMEN_LLM_PROXY")}


async def test_a_call_of_an_attempt_is_recorded_with_its_usage_and_cost_and_without_token_ids(
    world: LitellmWorld,
) -> None:
    before = world.proxy.metric("cost_dollars_total") or 0.0
    attempt, key = world.proxy.attempt()
    assert (await world.proxy.chat(key, model="gemini"))[0] == 200
    await world.proxy.flush(attempt)
    ((span, record),) = world.store.spans(attempt)
    attributes = {each.key: each.value for each in span.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == PROMPT_TOKENS
    assert attributes["gen_ai.usage.output_tokens"].int_value == TOKENS
    assert record is None or not record.prompt_token_ids
    cost = (2 * PROMPT_TOKENS + 8 * TOKENS) / 1e6
    assert (world.proxy.metric("cost_dollars_total") or 0.0) - before == pytest.approx(cost)


async def test_a_policy_cannot_be_served_through_it(world: LitellmWorld) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        await lead(world.proxy, "trained", "gemini", policy="arithmetic")
    assert [each.field for each in refused.value.violations] == ["route.targets[0].policy"]
    await world.proxy.register("engine", "http://127.0.0.1:1/v1")
    await lead(world.proxy, "trained", "engine", policy="arithmetic")
    with pytest.raises(ArgumentInvalid) as changed:
        await register(world.proxy, "gemini", world.gemini.url, backend="engine")
    assert [each.field for each in changed.value.violations] == ["backend.dialect"]


async def test_all_that_is_wrong_with_a_backend_is_said_at_once(world: LitellmWorld) -> None:
    wrong: dict[str, Any] = {"engine": backend_pb2.ENGINE_VLLM, "health_path": "/health", "api_version": "1"}
    wrong |= {"returns_token_ids": True, "apis": [backend_pb2.API_RESPONSES], "region": "No Region"}
    with pytest.raises(ArgumentInvalid) as refused:
        await register(world.proxy, "No Provider", "http://127.0.0.1:1", backend="wrong", **wrong | {"key_name": ""})
    fields = {each.field.removeprefix("backend.") for each in refused.value.violations}
    assert fields == {*wrong, "provider"}


async def test_a_process_that_is_killed_or_hangs_ends_its_calls_with_an_error_and_is_started_again(
    world: LitellmWorld,
) -> None:
    await world.proxy.chat(world.key(), model="cohere")
    (hung,) = world.processes_of("cohere")
    hung.suspend()
    waiting = asyncio.create_task(world.proxy.chat(world.key(), model="cohere"))
    world.gemini.pause.clear()
    body = {"model": "gemini", "messages": HELLO, "stream": True}
    headers = {"Authorization": f"Bearer {world.key()}"}
    async with world.proxy.http.post(f"{world.proxy.url}/chat/completions", json=body, headers=headers) as answer:
        first = await answer.content.readany()
        assert PIECES[0].encode() in first
        (killed,) = world.processes_of("gemini")
        killed.kill()
        rest = await answer.content.read()
    assert b"[DONE]" not in rest
    assert b"backend_unavailable" in rest
    assert (await world.proxy.health("gemini")).last_failure_kind == "stream_broken"
    world.gemini.pause.set()
    async with asyncio.timeout(LIMIT_S):
        status, ended = await waiting
        assert (status, ended["error"]["code"]) == (502, "backend_unavailable")
        for name in ("gemini", "cohere"):
            while (await world.proxy.chat(world.key(), model=name))[0] != 200:  # noqa: ASYNC110  # another process
                await asyncio.sleep(POLL_S)
    assert not {killed.pid, hung.pid} & {process.pid for process in workers()}


async def test_processes_end_with_a_proxy_that_is_killed(tmp_path: Path) -> None:
    async with (
        FakeStore() as store,
        proxy_process(
            store.target, tmp_path / "ready", signing_key=SIGNING_KEY, litellm_python=litellm_python()
        ) as proxy,
        open_channel(f"127.0.0.1:{proxy.ports['port']}", token=proxy.token) as channel,
    ):
        backend = backend_pb2.Backend(
            name="backends/gemini",
            base_url="http://127.0.0.1:1",
            dialect=backend_pb2.DIALECT_LITELLM,
            provider="gemini",
        )
        route = route_pb2.Route(
            name="routes/gemini", targets=[route_pb2.RouteTarget(backend="backends/gemini", weight=1)]
        )
        await BackendServiceStub(channel).RegisterBackend(RegisterBackendRequest(backend=backend))
        await RouteServiceStub(channel).PutRoute(route_service_pb2.PutRouteRequest(route=route))
        async with asyncio.timeout(LIMIT_S):
            while not (found := workers(proxy.process.pid)):  # noqa: ASYNC110  # another process
                await asyncio.sleep(POLL_S)
            await proxy.kill()
            while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in found):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def test_a_vendor_that_no_route_leads_to_has_no_process(world: LitellmWorld) -> None:
    before = len(workers())
    await world.proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/bedrock"))

    async def is_gone() -> bool:
        return len(workers()) < before

    await eventually(is_gone)
