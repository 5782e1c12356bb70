"""One suite for every dialect and backend: answers, tool loops, captures, refusals and broken streams."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest
from anthropic.types import ModelInfo
from openai.types import Model

from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend, logprob_of, prompt_ids_of, token_ids_of
from tests.support.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect, StreamFailed, strict
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import POLICY, target
from tests.support.llm_proxy.sglang import SglangBackend
from tests.support.llm_proxy.vendor_world import AZURE, CHAT_ONLY, CLAUDE, ENGINE, GPT, VendorWorld, vendor_world

HELLO = [{"role": "user", "content": "hello"}]
SAID = "You said: hello"

NATIVE = [(CHAT, GPT), (RESPONSES, GPT), (MESSAGES, CLAUDE)]
TRANSLATED = [(CHAT, CLAUDE), (RESPONSES, CHAT_ONLY), (RESPONSES, CLAUDE), (MESSAGES, CHAT_ONLY), (MESSAGES, ENGINE)]
WAYS = [*NATIVE, (CHAT, AZURE), (RESPONSES, AZURE), (CHAT, ENGINE), (RESPONSES, ENGINE), *TRANSLATED]


def ways(*found: tuple[Dialect, str]) -> pytest.MarkDecorator:
    """Runs a test for each dialect and the model that it asks for."""
    ids = [f"{dialect.name}-{model}" for dialect, model in found]
    return pytest.mark.parametrize(("dialect", "model"), found, ids=ids)


each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@ways(*WAYS)
@streamed
async def test_an_answer_has_its_text_its_end_and_its_usage(
    world: VendorWorld, dialect: Dialect, model: str, stream: bool
) -> None:
    async with dialect.agent(world) as agent:
        said = await dialect.say(agent, model, HELLO, stream=stream)
        assert (said.text, said.end, said.calls) == (SAID, "stop", [])
        assert said.input_tokens > 0
        assert said.output_tokens > 0
        if model != ENGINE:
            short = await dialect.say(agent, model, HELLO, stream=stream, limit=2)
            assert (short.end, SAID.startswith(short.text)) == ("length", True)


@ways(*WAYS)
@streamed
async def test_an_agents_loop_calls_tools_and_hands_their_results_back(
    world: VendorWorld, dialect: Dialect, model: str, stream: bool
) -> None:
    tools = [dialect.tool(name) for name in ("add", "multiply")]
    async with dialect.agent(world) as agent:
        first = await dialect.say(agent, model, HELLO, stream=stream, tools=tools)
        turns = [*HELLO, *first.turns, *dialect.results(first.calls, "9")]
        last = await dialect.say(agent, model, turns, stream=stream, tools=tools)
    assert [call.name for call in first.calls] == ["add", "multiply"][: 1 if model == ENGINE else 2]
    assert {call.arguments["input"] for call in first.calls} == {"hello"}
    assert first.end == "tools"
    assert (last.text, last.end) == ("You said: 9", "stop")


@each_dialect
@streamed
@pytest.mark.parametrize("engine", [Backend, SglangBackend])
async def test_what_an_engine_samples_is_captured_to_the_token_and_kept_from_the_agent(
    world: VendorWorld, dialect: Dialect, engine: type[Backend], stream: bool
) -> None:
    kind = backend_pb2.ENGINE_SGLANG if engine is SglangBackend else backend_pb2.ENGINE_VLLM
    attempt, key = world.proxy.attempt()
    async with engine() as server, dialect.agent(world, key) as agent:
        await world.proxy.register("engine", server.url, engine=kind)
        await world.proxy.put_route(target("engine", version=3))
        said = await dialect.say(agent, ENGINE, HELLO, stream=stream, extra_body={"temperature": 0.5})
        [received] = server.received
    summary = await world.proxy.flush(attempt)
    expected = token_ids_of(SAID)
    assert (said.text, said.output_tokens, said.input_tokens) == (SAID, len(expected), len(prompt_ids_of(HELLO)))
    assert "token_ids" not in said.shown
    assert '"logprob"' not in said.shown
    assert received.body.get("stream", False) is (stream and engine is Backend)

    record = world.store.record(attempt)
    assert (record.usable, record.unusable_reason) == (True, "")
    assert array("i", record.prompt_token_ids).tolist() == prompt_ids_of(HELLO)
    assert array("i", record.completion_token_ids).tolist() == expected
    assert array("f", record.completion_logprobs).tolist() == pytest.approx(
        [logprob_of(token, i) for i, token in enumerate(expected)], rel=1e-6
    )
    assert [(r.version, r.start, r.end) for r in record.policy_versions] == [(3, 0, len(expected))]
    assert (record.model, record.policy, record.finish_reason) == (ENGINE, POLICY, "stop")
    assert record.temperature == pytest.approx(0.5)
    request, answer = json.loads(record.request_json), json.loads(record.response_json)
    assert (request["model"], request["messages"], "return_token_ids" in request) == ("byte-model", HELLO, False)
    assert (answer["object"], answer["choices"][0]["message"]["content"]) == ("chat.completion", SAID)
    assert (summary.flushed, summary.unusable_count, summary.completion_token_count) == (True, 0, len(expected))


REFUSALS = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
}


@ways(*WAYS)
async def test_the_backends_refusals_reach_the_client_in_its_own_classes(
    world: VendorWorld, dialect: Dialect, model: str
) -> None:
    async with dialect.agent(world) as agent:
        for status, name in REFUSALS.items():
            if status not in (404, 422) or model in (GPT, AZURE, CHAT_ONLY):
                world.refuse(model, status)
                with pytest.raises(getattr(dialect.errors, name), match=r"says no|answers \d+") as refused:
                    await dialect.say(agent, model, HELLO)
                assert refused.value.status_code == status
                assert refused.value.response.headers["retry-after"] == "3600"
                assert refused.value.response.headers["x-fulmen-error-source"] == "backend"


@ways(*WAYS)
@pytest.mark.parametrize("with_error", [True, False], ids=["an error", "the connection"])
async def test_a_stream_that_ends_midway_raises_in_the_client(
    world: VendorWorld, dialect: Dialect, model: str, with_error: bool
) -> None:
    world.break_stream(model, after=4, with_error=with_error and model != ENGINE)
    reported = (
        "had an error while processing|Overloaded"
        if with_error and model != ENGINE
        else "interrupted its answer|ended before"
    )
    async with dialect.agent(world) as agent:
        with pytest.raises((dialect.errors.APIError, StreamFailed), match=reported):
            await dialect.say(agent, model, HELLO, stream=True)


@each_dialect
async def test_the_proxys_refusals_reach_the_client_in_its_own_classes(world: VendorWorld, dialect: Dialect) -> None:
    errors = dialect.errors
    reader = world.proxy.signer.issue(Role.READER, subject="r", project=DEFAULT_PROJECT, ttl_s=60)
    for key, model, error in (
        ("nonsense", GPT, errors.AuthenticationError),
        (reader, GPT, errors.PermissionDeniedError),
        (None, "gone", errors.NotFoundError),
    ):
        async with dialect.agent(world, key) as agent:
            with pytest.raises(error) as refused:
                await dialect.say(agent, model, HELLO)
        assert refused.value.response.headers["x-fulmen-error-source"] == "proxy"
    assert "Served models: claude, gpt, gpt-azure, gpt-chat, tiny." in str(refused.value)


@each_dialect
async def test_limits_and_an_absent_backend_reach_the_client_in_its_own_classes(
    store: FakeStore, backend: Backend, dialect: Dialect
) -> None:
    errors = dialect.errors
    async with vendor_world(store, backend, max_in_flight=1) as world, dialect.agent(world) as agent:
        backend.switches.gate = asyncio.Event()
        first = asyncio.create_task(dialect.say(agent, ENGINE, HELLO))
        await backend.arrived.acquire()
        with pytest.raises(errors.RateLimitError) as busy:
            await dialect.say(agent, ENGINE, HELLO)
        backend.switches.gate.set()
        await first
        await backend.stop()
        with pytest.raises(errors.InternalServerError) as away:
            await dialect.say(agent, ENGINE, HELLO)
    assert busy.value.response.headers["retry-after"] == "1"
    assert away.value.status_code == 502


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES], ids=lambda dialect: dialect.name)
async def test_models_are_listed_and_found_one_by_one_in_the_vendors_shape(
    world: VendorWorld, dialect: Dialect
) -> None:
    async with dialect.agent(world) as agent:
        assert [model.id async for model in agent.models.list()] == sorted([GPT, AZURE, CHAT_ONLY, CLAUDE, ENGINE])
        found = await agent.models.retrieve(GPT)
        with pytest.raises(dialect.errors.NotFoundError, match="Served models"):
            await agent.models.retrieve("gone")
    async with dialect.agent(world, "nonsense") as stranger:
        for refused in (stranger.models.list(), stranger.models.retrieve(GPT)):
            with pytest.raises(dialect.errors.AuthenticationError):
                await refused
    assert found.id == GPT
    strict(Model if dialect is CHAT else ModelInfo, found)
