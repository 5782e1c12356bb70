"""The unmodified OpenAI client against the proxy: vendors behind it, and an engine whose tokens are captured.

Whatever the client hands to a test has been parsed by the vendor's own types; where it matters that
every field is of its type, the test has pydantic check the whole model.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from fulmen.llm_proxy.v1 import backend_pb2
from tests.support.llm_proxy.backend import Backend, logprob_of, reply_to, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, target
from tests.support.llm_proxy.openai_world import AZURE, CHAT_ONLY, GPT, VENDOR_MODEL, OpenAiWorld, openai_world
from tests.support.llm_proxy.vendors.openai import API_VERSION, EMBEDDING, KEY, Fault
from tests.support.llm_proxy.vendors.openai_turns import LOGPROB

USER: Any = [{"role": "user", "content": "hello"}]
IMAGE = "data:image/png;base64,iVBORw0KGgo="
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "multiply")
]
FLAT_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("add", "multiply")
]


class Sum(BaseModel):
    """A structured answer."""

    reason: str
    total: int


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[OpenAiWorld]:
    """Yields a proxy before four backends."""
    async with openai_world(store, backend) as running:
        yield running


def strict(model: type[BaseModel], answer: BaseModel) -> None:
    """Has pydantic check every field of what the client parsed leniently."""
    model.model_validate(answer.model_dump(mode="json", by_alias=True, exclude_unset=True))


# --- chat completions ---


@pytest.mark.parametrize("model", [GPT, AZURE])
async def test_chat_with_every_detail_passes_through(world: OpenAiWorld, model: str) -> None:
    async with world.agent() as agent:
        answer = await agent.chat.completions.create(
            model=model, messages=USER, n=2, logprobs=True, top_logprobs=1, seed=7, max_completion_tokens=3
        )
    strict(ChatCompletion, answer)
    assert [choice.message.content for choice in answer.choices] == ["You said: he"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.choices[1].logprobs.content[0].logprob == LOGPROB
    assert (answer.usage.prompt_tokens_details.cached_tokens, answer.model_extra) == (1, {"vendor_extra": {"a": 1}})
    sent = world.vendor.received[-1]
    assert sent.body["seed"] == 7
    if model == AZURE:
        assert sent.path == f"/openai/deployments/{VENDOR_MODEL}/chat/completions"
        assert sent.query == {"api-version": API_VERSION}
        assert sent.headers["api-key"] == KEY


@pytest.mark.parametrize("model", [GPT, AZURE])
async def test_a_chat_stream_passes_through_with_its_usage_if_asked(world: OpenAiWorld, model: str) -> None:
    async with world.agent() as agent:
        stream = await agent.chat.completions.create(
            model=model, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        silent = await agent.chat.completions.create(model=model, messages=USER, stream=True)
        unasked = [chunk async for chunk in silent]
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "You said: hello"
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.choices and chunk.usage is None for chunk in unasked)


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_and_their_results(world: OpenAiWorld, stream: bool) -> None:
    async with world.agent() as agent:
        if stream:
            async with agent.chat.completions.stream(model=GPT, messages=USER, tools=TOOLS) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await agent.chat.completions.create(model=GPT, messages=USER, tools=TOOLS)).choices[0].message
        calls = message.tool_calls or []
        assert [call.function.name for call in calls] == ["add", "multiply"]
        assert [json.loads(call.function.arguments) for call in calls] == [{"input": "hello"}] * 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
        said = message.model_dump(exclude_unset=True, exclude_none=True, exclude={"annotations"})
        for call in said["tool_calls"]:
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        said.pop("parsed", None)
        history: Any = [*USER, said, *results]
        last = await agent.chat.completions.create(model=GPT, messages=history, tools=TOOLS)
    assert last.choices[0].message.content == "You said: 5"


async def test_structured_output_refusals_and_images(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        parsed = await agent.chat.completions.parse(model=GPT, messages=USER, response_format=Sum)
        refusal: Any = [{"role": "user", "content": "refuse this"}]
        refused = await agent.chat.completions.parse(model=GPT, messages=refusal, response_format=Sum)
        picture = {"type": "image_url", "image_url": {"url": IMAGE}}
        seen: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}]
        shown = await agent.chat.completions.create(model=GPT, messages=seen)
    assert parsed.choices[0].message.parsed == Sum(reason="seven", total=7)
    assert refused.choices[0].message.refusal == "I cannot help with that."
    assert shown.choices[0].message.content == "You said: see and showed 1 images."


async def test_unknown_request_fields_reach_the_vendor(world: OpenAiWorld) -> None:
    world.vendor.also = frozenset({"brand_new"})
    async with world.agent() as agent:
        await agent.chat.completions.create(model=GPT, messages=USER, extra_body={"brand_new": {"x": [1]}})
        assert world.vendor.received[-1].body["brand_new"] == {"x": [1]}
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: odd"):
            await agent.chat.completions.create(model=GPT, messages=USER, extra_body={"odd": 1})


# --- completions, embeddings, models ---


async def test_completions_of_a_vendor(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        answer = await agent.completions.create(model=GPT, prompt=["one", "two"], n=2, logprobs=0)
        stream = await agent.completions.create(model=AZURE, prompt="one", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    strict(Completion, answer)
    assert [choice.text for choice in answer.choices] == ["You said: one"] * 2 + ["You said: two"] * 2
    assert answer.choices[3].logprobs.token_logprobs[0] == LOGPROB
    assert streamed == "You said: one"
    assert world.vendor.received[-1].path.endswith(f"{VENDOR_MODEL}/completions")


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_an_engine_are_captured_to_the_token(world: OpenAiWorld, stream: bool) -> None:
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent:
        if stream:
            events = await agent.completions.create(model=MODEL, prompt=["abc", "de"], n=2, stream=True)
            choices = [choice async for chunk in events for choice in chunk.choices]
        else:
            choices = (await agent.completions.create(model=MODEL, prompt=["abc", "de"], n=2)).choices
    await world.proxy.flush(attempt)
    assert all(choice.logprobs is None and "token_ids" not in (choice.model_extra or {}) for choice in choices)
    assert all("prompt_token_ids" not in (choice.model_extra or {}) for choice in choices)
    records = [record for _, record in world.store.spans(attempt)]
    assert all(record.usable for record in records), [record.unusable_reason for record in records]
    prompts = [list(b"abc"), list(b"abc"), list(b"de"), list(b"de")]
    assert [ints(record.prompt_token_ids) for record in records] == prompts
    assert [ints(record.completion_token_ids) for record in records] == [ids[::-1] for ids in prompts]
    for record, ids in zip(records, prompts, strict=True):
        expected = [logprob_of(token, position) for position, token in enumerate(ids[::-1])]
        assert array("f", record.completion_logprobs).tolist() == pytest.approx(expected, rel=1e-6)
    assert [choice["text"] for choice in json.loads(records[0].response_json)["choices"]] == ["cba", "cba", "ed", "ed"]


async def test_an_echo_cannot_be_captured(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        with pytest.raises(openai.BadRequestError, match="echo"):
            await agent.completions.create(model=MODEL, prompt="abc", echo=True)
    assert world.backend.received == []


async def test_embeddings_as_floats_and_as_base64(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        packed = await agent.embeddings.create(model=GPT, input=["a", "b"])
        assert world.vendor.received[-1].body["encoding_format"] == "base64"
        plain = await agent.embeddings.create(model=AZURE, input="a", encoding_format="float")
    strict(CreateEmbeddingResponse, plain)
    assert [entry.embedding for entry in packed.data] == [EMBEDDING, EMBEDDING]
    assert (plain.data[0].embedding, plain.usage.prompt_tokens) == (EMBEDDING, 1)


async def test_models_are_listed_and_found_one_by_one(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        assert [model.id async for model in agent.models.list()] == sorted([GPT, AZURE, CHAT_ONLY, MODEL])
        assert (await agent.models.retrieve(GPT)).id == GPT
        with pytest.raises(openai.NotFoundError, match="Served models"):
            await agent.models.retrieve("gone")


# --- responses: passed through, translated, captured ---


@pytest.mark.parametrize("model", [GPT, AZURE, CHAT_ONLY])
async def test_a_response_and_its_stream_agree_whoever_makes_it(world: OpenAiWorld, model: str) -> None:
    async with world.agent() as agent:
        whole = await agent.responses.create(model=model, input="hello", instructions="be brief", metadata={"k": "v"})
        async with agent.responses.stream(model=model, input="hello", instructions="be brief") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    strict(Response, whole)
    assert whole.output_text == streamed.output_text == "You said: hello"
    assert (whole.status, whole.metadata, whole.usage.output_tokens) == ("completed", {"k": "v"}, 4)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    paths = {GPT: "/v1/responses", AZURE: "/openai/responses", CHAT_ONLY: "/v1/chat/completions"}
    assert world.vendor.received[-1].path == paths[model]


@pytest.mark.parametrize("model", [GPT, CHAT_ONLY])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agents_loop_over_responses(world: OpenAiWorld, model: str, stream: bool) -> None:
    async with world.agent() as agent:
        said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
        if stream:
            async with agent.responses.stream(model=model, input=said, tools=FLAT_TOOLS, store=False) as events:
                async for _ in events:
                    pass
                first = await events.get_final_response()
        else:
            first = await agent.responses.create(model=model, input=said, tools=FLAT_TOOLS, store=False)
        calls = [item for item in first.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("add", {"input": "go"}),
            ("multiply", {"input": "go"}),
        ]
        said += [call.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for call in calls]
        said += [{"type": "function_call_output", "call_id": call.call_id, "output": "9"} for call in calls]
        last = await agent.responses.create(model=model, input=said, tools=FLAT_TOOLS, store=False)
    assert last.output_text == "You said: 9"


@pytest.mark.parametrize("model", [GPT, CHAT_ONLY])
async def test_structured_responses_images_and_limits(world: OpenAiWorld, model: str) -> None:
    async with world.agent() as agent:
        parsed = await agent.responses.parse(model=model, input="x", text_format=Sum)
        picture = {"type": "input_image", "image_url": IMAGE, "detail": "low"}
        seen: Any = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, picture]}]
        shown = await agent.responses.create(model=model, input=seen)
        short = await agent.responses.create(model=model, input="hello", max_output_tokens=2)
    assert parsed.output_parsed == Sum(reason="seven", total=7)
    assert shown.output_text == "You said: see and showed 1 images."
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("engine", [backend_pb2.ENGINE_VLLM, backend_pb2.ENGINE_SGLANG])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_on_an_engine_are_captured_by_chat(world: OpenAiWorld, stream: bool, engine: int) -> None:
    await world.proxy.register("engine", world.backend.url, engine=engine)
    await world.proxy.put_route(target("engine"))
    attempt, key = world.proxy.attempt()
    async with world.agent(key) as agent:
        if stream:
            async with agent.responses.stream(model=MODEL, input="hello", temperature=0.5) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await agent.responses.create(model=MODEL, input="hello", temperature=0.5)
    await world.proxy.flush(attempt)
    expected = reply_to([{"content": "hello"}])
    assert answer.output_text == expected
    assert answer.usage.output_tokens == len(token_ids_of(expected))
    [(_, record)] = world.store.spans(attempt)
    assert record.usable, record.unusable_reason
    assert ints(record.completion_token_ids) == token_ids_of(expected)
    assert record.temperature == pytest.approx(0.5)
    assert json.loads(record.response_json)["object"] == "chat.completion"


async def test_what_a_translated_response_cannot_be_is_one_clear_error(world: OpenAiWorld) -> None:
    async with world.agent() as agent:
        with pytest.raises(openai.BadRequestError, match="the tool 'web_search' of type 'web_search'"):
            await agent.responses.create(model=CHAT_ONLY, input="x", tools=[{"type": "web_search"}])
        with pytest.raises(openai.BadRequestError, match="`background`"):
            await agent.responses.create(model=CHAT_ONLY, input="x", background=True)


def ints(packed: bytes) -> list[int]:
    """Unpacks token ids."""
    return array("i", packed).tolist()


# --- the other clients of the package ---


@pytest.mark.parametrize("deployment", [None, GPT])
async def test_the_client_of_azure_may_be_pointed_at_the_proxy(world: OpenAiWorld, deployment: str | None) -> None:
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=world.proxy.url.removesuffix("/v1"),
        azure_deployment=deployment,
        api_key=world.key(),
        api_version=API_VERSION,
        max_retries=0,
    ) as agent:
        # A deployment in the address counts, whatever model the body names.
        answer = await agent.chat.completions.create(model=GPT if deployment is None else "unread", messages=USER)
        embedded = await agent.embeddings.create(model=AZURE, input="a")
        response = await agent.responses.create(model=CHAT_ONLY, input="hello")
        with pytest.raises(openai.NotFoundError, match="not found"):
            await agent.images.generate(model=GPT, prompt="x")
    assert answer.choices[0].message.content == response.output_text == "You said: hello"
    assert embedded.data[0].embedding == EMBEDDING


async def test_the_client_without_asyncio(world: OpenAiWorld) -> None:
    key = world.key()

    def play() -> tuple[str | None, str, str]:
        with openai.OpenAI(base_url=world.proxy.url, api_key=key, max_retries=0) as agent:
            whole = agent.chat.completions.create(model=GPT, messages=USER).choices[0].message.content
            stream = agent.chat.completions.create(model=GPT, messages=USER, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole, streamed, agent.responses.create(model=CHAT_ONLY, input="hello").output_text

    assert await asyncio.to_thread(play) == ("You said: hello",) * 3


# --- errors, as the client raises them ---


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(status=400, code="context_length_exceeded"), openai.BadRequestError),
        (Fault(status=404, code="model_not_found"), openai.NotFoundError),
        (Fault(status=422), openai.UnprocessableEntityError),
        (Fault(status=429, code="rate_limit_exceeded", headers={"Retry-After": "3600"}), openai.RateLimitError),
        (Fault(status=500, type="server_error"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("by_responses", [False, True])
async def test_a_vendors_refusal_is_raised_as_its_own_client_raises_it(
    world: OpenAiWorld, fault: Fault, raised: type[openai.APIStatusError], by_responses: bool
) -> None:
    world.vendor.faults.append(fault)
    async with world.agent() as agent:
        call: Any = (
            agent.responses.create(model=CHAT_ONLY, input="x")
            if by_responses
            else agent.chat.completions.create(model=GPT, messages=USER)
        )
        with pytest.raises(raised, match="The vendor says no") as caught:
            await call
    assert (caught.value.status_code, caught.value.code) == (fault.status, fault.code)
    assert caught.value.response.headers.get("retry-after") == fault.headers.get("Retry-After")
    assert caught.value.response.headers["x-fulmen-error-source"] == "backend"


async def test_a_wrong_key_an_unknown_model_and_a_bad_request_are_the_proxys(world: OpenAiWorld) -> None:
    async with world.agent("nonsense") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=GPT, messages=USER)
    async with world.agent() as agent:
        with pytest.raises(openai.NotFoundError) as unknown:
            await agent.responses.create(model="gone", input="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await agent.embeddings.create(model=GPT, input=openai.omit)  # type: ignore[arg-type]
    assert (unknown.value.code, bad.value.code) == ("route_not_found", "argument_invalid")


async def test_an_error_within_a_chat_stream_is_raised_after_what_was_said(world: OpenAiWorld) -> None:
    world.vendor.error_after = 2
    async with world.agent() as agent:
        stream = await agent.chat.completions.create(model=GPT, messages=USER, stream=True)
        said = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="had an error while processing"):
            await anext(stream)
    assert said == ["", "You "]


@pytest.mark.parametrize("model", [GPT, CHAT_ONLY])
async def test_an_error_within_a_stream_of_a_response_is_an_event(world: OpenAiWorld, model: str) -> None:
    world.vendor.error_after = 3
    async with world.agent() as agent:
        stream = await agent.responses.create(model=model, input="hello", stream=True)
        events = [event async for event in stream]
    last = events[-1]
    message = last.message if last.type == "error" else last.response.error.message
    assert last.type == ("error" if model == GPT else "response.failed")
    assert "had an error while processing" in message
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_connection_that_breaks_within_a_stream_is_an_error_of_the_backend(world: OpenAiWorld) -> None:
    world.vendor.cut_after = 3
    async with world.agent() as agent:
        stream = await agent.chat.completions.create(model=GPT, messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="broke off its answer"):
            [chunk async for chunk in stream]
