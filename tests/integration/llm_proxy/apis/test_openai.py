"""Features of OpenAI's APIs only, with the vendor's unmodified client; the rest is in `test_dialects`."""

from __future__ import annotations

import json
from array import array
from typing import Any

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from tests.support.llm_proxy.backend import logprob_of
from tests.support.llm_proxy.dialects import strict
from tests.support.llm_proxy.harness import MODEL
from tests.support.llm_proxy.vendor_world import AZURE, CHAT_ONLY, GPT, VENDOR_MODEL, VendorWorld
from tests.support.llm_proxy.vendors.openai import API_VERSION, EMBEDDING, KEY
from tests.support.llm_proxy.vendors.openai_turns import LOGPROB

USER: Any = [{"role": "user", "content": "hello"}]
IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Sum(BaseModel):
    """A structured answer."""

    reason: str
    total: int


# --- chat completions ---


@pytest.mark.parametrize("model", [GPT, AZURE])
async def test_chat_with_every_detail_passes_through(world: VendorWorld, model: str) -> None:
    async with world.openai_agent() as agent:
        answer = await agent.chat.completions.create(
            model=model, messages=USER, n=2, logprobs=True, top_logprobs=1, seed=7, max_completion_tokens=3
        )
    strict(ChatCompletion, answer)
    assert [choice.message.content for choice in answer.choices] == ["You said: he"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.choices[1].logprobs.content[0].logprob == LOGPROB
    assert (answer.usage.prompt_tokens_details.cached_tokens, answer.model_extra) == (1, {"vendor_extra": {"a": 1}})
    sent = world.openai.received[-1]
    assert sent.body["seed"] == 7
    if model == AZURE:
        assert sent.path == f"/openai/deployments/{VENDOR_MODEL}/chat/completions"
        assert sent.query == {"api-version": API_VERSION}
        assert sent.headers["api-key"] == KEY


@pytest.mark.parametrize("model", [GPT, AZURE])
async def test_a_chat_stream_passes_through_with_its_usage_if_asked(world: VendorWorld, model: str) -> None:
    async with world.openai_agent() as agent:
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


async def test_structured_output_refusals_and_images(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        parsed = await agent.chat.completions.parse(model=GPT, messages=USER, response_format=Sum)
        refusal: Any = [{"role": "user", "content": "refuse this"}]
        refused = await agent.chat.completions.parse(model=GPT, messages=refusal, response_format=Sum)
        picture = {"type": "image_url", "image_url": {"url": IMAGE}}
        seen: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}]
        shown = await agent.chat.completions.create(model=GPT, messages=seen)
    assert parsed.choices[0].message.parsed == Sum(reason="seven", total=7)
    assert refused.choices[0].message.refusal == "I cannot help with that."
    assert shown.choices[0].message.content == "You said: see and showed 1 images."


async def test_unknown_request_fields_reach_the_vendor(world: VendorWorld) -> None:
    world.openai.also = frozenset({"brand_new"})
    async with world.openai_agent() as agent:
        await agent.chat.completions.create(model=GPT, messages=USER, extra_body={"brand_new": {"x": [1]}})
        assert world.openai.received[-1].body["brand_new"] == {"x": [1]}
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: odd"):
            await agent.chat.completions.create(model=GPT, messages=USER, extra_body={"odd": 1})


# --- completions, embeddings, models ---


async def test_completions_of_a_vendor(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        answer = await agent.completions.create(model=GPT, prompt=["one", "two"], n=2, logprobs=0)
        stream = await agent.completions.create(model=AZURE, prompt="one", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    strict(Completion, answer)
    assert [choice.text for choice in answer.choices] == ["You said: one"] * 2 + ["You said: two"] * 2
    assert answer.choices[3].logprobs.token_logprobs[0] == LOGPROB
    assert streamed == "You said: one"
    assert world.openai.received[-1].path.endswith(f"{VENDOR_MODEL}/completions")


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_an_engine_are_captured_to_the_token(world: VendorWorld, stream: bool) -> None:
    attempt, key = world.proxy.attempt()
    async with world.openai_agent(key) as agent:
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


async def test_an_echo_cannot_be_captured(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        with pytest.raises(openai.BadRequestError, match="echo"):
            await agent.completions.create(model=MODEL, prompt="abc", echo=True)
    assert world.backend.received == []


async def test_embeddings_as_floats_and_as_base64(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        packed = await agent.embeddings.create(model=GPT, input=["a", "b"])
        assert world.openai.received[-1].body["encoding_format"] == "base64"
        plain = await agent.embeddings.create(model=AZURE, input="a", encoding_format="float")
    strict(CreateEmbeddingResponse, plain)
    assert [entry.embedding for entry in packed.data] == [EMBEDDING, EMBEDDING]
    assert (plain.data[0].embedding, plain.usage.prompt_tokens) == (EMBEDDING, 1)


# --- responses: passed through, translated, captured ---


@pytest.mark.parametrize("model", [GPT, AZURE, CHAT_ONLY])
async def test_a_response_and_its_stream_agree_whoever_makes_it(world: VendorWorld, model: str) -> None:
    async with world.openai_agent() as agent:
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
    assert world.openai.received[-1].path == paths[model]


@pytest.mark.parametrize("model", [GPT, CHAT_ONLY])
async def test_structured_responses_images_and_limits(world: VendorWorld, model: str) -> None:
    async with world.openai_agent() as agent:
        parsed = await agent.responses.parse(model=model, input="x", text_format=Sum)
        picture = {"type": "input_image", "image_url": IMAGE, "detail": "low"}
        seen: Any = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, picture]}]
        shown = await agent.responses.create(model=model, input=seen)
        short = await agent.responses.create(model=model, input="hello", max_output_tokens=2)
    assert parsed.output_parsed == Sum(reason="seven", total=7)
    assert shown.output_text == "You said: see and showed 1 images."
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_what_a_translated_response_cannot_be_is_one_clear_error(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        with pytest.raises(openai.BadRequestError, match="the tool 'web_search' of type 'web_search'"):
            await agent.responses.create(model=CHAT_ONLY, input="x", tools=[{"type": "web_search"}])
        with pytest.raises(openai.BadRequestError, match="`background`"):
            await agent.responses.create(model=CHAT_ONLY, input="x", background=True)


def ints(packed: bytes) -> list[int]:
    """Unpacks token ids."""
    return array("i", packed).tolist()


# --- the other clients of the package ---


@pytest.mark.parametrize("deployment", [None, GPT])
async def test_the_client_of_azure_may_be_pointed_at_the_proxy(world: VendorWorld, deployment: str | None) -> None:
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


async def test_the_end_of_a_calls_arguments_names_the_function(world: VendorWorld) -> None:
    tools: Any = [{"type": "function", "name": "calculate", "parameters": {"type": "object"}, "strict": False}]
    async with world.openai_agent() as agent:
        stream = await agent.responses.create(model=CHAT_ONLY, input="hello", tools=tools, stream=True, store=False)
        ended = [event async for event in stream if event.type == "response.function_call_arguments.done"]
    assert [event.name for event in ended] == ["calculate"]
