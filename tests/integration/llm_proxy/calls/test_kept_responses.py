"""Responses that a vendor keeps: found again at the vendor that has them, by their own project alone."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from fulmen.ids import AttemptName, uuid7
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.rogue_backend import RESPONSES, Act, answers, hangs_after
from tests.support.llm_proxy.rogue_world import NATIVE, RogueWorld, request_of, rogue_world
from tests.support.llm_proxy.vendor_world import AZURE, CHAT_ONLY, CLAUDE, GPT, VENDOR_MODEL, VendorWorld
from tests.support.llm_proxy.vendors.openai import OpenAiVendor

BOTH = "gpt-anywhere"


async def last_of(agent: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    """Returns the response, whole or at the end of its stream."""
    if not stream:
        return await agent.responses.create(**fields)
    async with agent.responses.stream(**fields) as events:
        ids = {event.response.id async for event in events if hasattr(event, "response")}
        final = await events.get_final_response()
    assert ids == {final.id}
    return final


@pytest.mark.parametrize("model", [GPT, AZURE])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_gone_on_from_read_and_deleted(world: VendorWorld, model: str, stream: bool) -> None:
    async with world.openai_agent() as agent:
        first = await last_of(agent, stream=stream, model=model, input="one")
        second = await last_of(agent, stream=stream, model=model, input="two", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        found = await agent.responses.retrieve(second.id)
        assert (found.id, found.output_text, found.previous_response_id) == (second.id, "You said: two", first.id)
        await agent.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await agent.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await agent.responses.create(model=model, input="x", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"
    assert list(world.openai.kept) == [second.id.split("~")[0]]


async def test_of_two_vendors_behind_a_model_the_one_that_has_the_response_is_asked(world: VendorWorld) -> None:
    async with OpenAiVendor(models=(VENDOR_MODEL,)) as other:
        apis = [backend_pb2.API_RESPONSES]
        await world.proxy.register("other", other.url, apis=apis, returns_token_ids=False, key_name="openai")
        places = [
            route_pb2.RouteTarget(backend=f"backends/{name}", backend_model=VENDOR_MODEL, weight=1)
            for name in ("openai", "other")
        ]
        await world.proxy.put_route(*places, model=BOTH)
        for vendor in (world.openai, other) * 4:
            # A key without an attempt: each call is drawn anew.
            async with world.openai_agent(client_key(world)) as agent:
                before = len(vendor.received)
                first = await agent.responses.create(model=BOTH, input="one")
                while len(vendor.received) == before:
                    first = await agent.responses.create(model=BOTH, input="one")
                second = await agent.responses.create(model=BOTH, input="two", previous_response_id=first.id)
                assert second.output_text == "You said: two"
                assert vendor.received[-1].body["previous_response_id"] == first.id.split("~")[0]
                assert (await agent.responses.retrieve(second.id)).id == second.id


def client_key(world: VendorWorld) -> str:
    """Returns a key that is no attempt's."""
    return world.proxy.signer.issue(Role.CLIENT, subject="tests", ttl_s=600)


async def test_another_project_finds_no_response_by_its_id(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        made = await agent.responses.create(model=GPT, input="one")
    stranger = world.proxy.signer.attempt_key(
        AttemptName(project="projects/other", rollout_id=uuid7(), number=1),
        project="projects/other",
        lease_id="l",
        epoch=1,
        mode="train",
        ttl_s=60,
    )
    calls = len(world.openai.received)
    async with world.openai_agent(stranger) as agent:
        with pytest.raises(openai.NotFoundError) as hidden:
            await agent.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="created elsewhere"):
            await agent.responses.create(model=GPT, input="x", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            await agent.responses.retrieve(made.id.split("~")[0])
    assert hidden.value.code == "response_not_found"
    assert len(world.openai.received) == calls


async def test_a_model_whose_backend_keeps_nothing_says_so(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        kept = await agent.responses.create(model=GPT, input="one")
        translated = await agent.responses.create(model=CHAT_ONLY, input="one")
        assert translated.store is False  # the store of this world keeps none
        with pytest.raises(openai.BadRequestError, match="was not stored"):
            await agent.responses.create(model=CHAT_ONLY, input="x", previous_response_id=translated.id)
        with pytest.raises(openai.BadRequestError, match=f"does not serve model '{CHAT_ONLY}'"):
            await agent.responses.create(model=CHAT_ONLY, input="x", previous_response_id=kept.id)
        unkept = await agent.responses.create(model=GPT, input="one", store=False)
        assert "~" not in unkept.id


async def test_what_is_not_served_of_a_kept_response_is_refused_here(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        made = await agent.responses.create(model=GPT, input="one")
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            await agent.responses.retrieve(made.id, stream=True)
        with pytest.raises(openai.APIStatusError) as wrong:
            await agent.post(f"/responses/{made.id}", cast_to=object)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await agent.post(f"/responses/{made.id}/compact", cast_to=object)
    async with world.openai_agent("nonsense") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.retrieve(made.id)
    assert wrong.value.status_code == 405


@pytest.mark.parametrize("model", [GPT, CHAT_ONLY, CLAUDE])
async def test_a_stream_that_breaks_off_ends_with_a_numbered_event(world: VendorWorld, model: str) -> None:
    world.break_stream(model, after=3, with_error=False)
    async with world.openai_agent() as agent:
        events = [event async for event in await agent.responses.create(model=model, input="hello", stream=True)]
    assert events[-1].type == ("error" if model == GPT else "response.failed")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def cancelled(world: RogueWorld, act: Act) -> tuple[int, str]:
    """Asks for the end of a response whose backend then acts so; returns the status and the error's code."""
    key = world.key()
    made = await world.post(RESPONSES, request_of(RESPONSES, NATIVE[RESPONSES]), key)
    world.backend.act = act
    answer = await world.post(f"{RESPONSES}/{json.loads(made.body)['id']}/cancel", {}, key)
    return answer.status, answer.code


async def test_a_backend_that_does_not_answer_for_a_response_is_given_up_at_the_deadline() -> None:
    async with rogue_world(answer_deadline_s=0.5) as world:
        half = hangs_after(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        assert await cancelled(world, half) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 302 Found\r\nlocation: /elsewhere", b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip"]
)
async def test_what_is_no_answer_for_a_response_is_told_as_the_backends_failure(head: bytes) -> None:
    async with rogue_world() as world:
        no_answer = answers(head + b"\r\ncontent-length: 2\r\n\r\n{}")
        assert await cancelled(world, no_answer) == (502, "backend_unavailable")
