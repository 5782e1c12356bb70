"""Backends of vendors: their addresses, marks of the cache, conversations that they refuse, headers and dropped parameters."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.translation.chat_turns import SILENCE
from tests.support.llm_proxy.vendor_world import CHAT_ONLY, CLAUDE, EVERY_OPENAI_API, GPT, VENDOR_MODEL, VendorWorld
from tests.support.llm_proxy.vendors.anthropic import MODEL as ANTHROPIC_MODEL

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MARK = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
FUNCTION: Any = {"name": "calculate", "parameters": {"type": "object", "properties": {}}}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": "{}"}}


async def lead(world: VendorWorld, model: str, backend: str, url: str, served: str, **fields: Any) -> None:
    """Registers a backend without token ids, and a route to it."""
    await world.proxy.register(backend, url, **{"returns_token_ids": False} | fields)
    place = route_pb2.RouteTarget(backend=f"backends/{backend}", backend_model=served, weight=1)
    await world.proxy.put_route(place, model=model)


async def sent_to_claude(world: VendorWorld, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Makes a chat call, which the vendor accepts; returns what it received."""
    async with world.openai_agent() as agent:
        answer = await agent.chat.completions.create(model=CLAUDE, messages=messages, **fields)
    assert answer.choices[0].message.content
    return world.anthropic.received[-1].body


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("below", ["", "/"])
async def test_an_address_of_anthropics_service_is_right_with_and_without_the_version(
    world: VendorWorld, versioned: bool, below: str
) -> None:
    url = world.anthropic.url if versioned else world.anthropic.root
    traits = {"dialect": backend_pb2.DIALECT_ANTHROPIC, "key_name": "anthropic"}
    await lead(world, "claude-too", "claude-too", url + below, ANTHROPIC_MODEL, **traits)
    async with world.anthropic_agent() as messages, world.openai_agent() as chats:
        assert (await messages.messages.create(model="claude-too", max_tokens=64, messages=HELLO)).content
        assert (await messages.messages.count_tokens(model="claude-too", messages=HELLO)).input_tokens
        assert (await chats.chat.completions.create(model="claude-too", messages=HELLO)).choices
    paths = [one.path for one in world.anthropic.received]
    assert paths == ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages"]


async def test_marks_of_the_cache_reach_anthropics_service_from_wherever_a_chat_agent_sets_them(
    world: VendorWorld,
) -> None:
    """On parts, messages, calls, results and tools, in the places that it has for them."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "rules", "cache_control": LONG}]},
        {"role": "developer", "content": "more rules", "cache_control": MARK},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}, "cache_control": MARK},
                {"type": "text", "text": "look"},
            ],
        },
        {"role": "assistant", "content": "I call.", "tool_calls": [CALL | {"cache_control": MARK}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4", "cache_control": MARK}]},
        {"role": "assistant", "content": "so", "cache_control": MARK},
        {"role": "user", "content": "and?", "cache_control": LONG},
    ]
    tools: list[Any] = [
        {"type": "function", "function": FUNCTION, "cache_control": MARK},
        {"type": "function", "function": FUNCTION | {"name": "look_up", "cache_control": LONG}},
    ]
    got = await sent_to_claude(world, messages, tools=tools, tool_choice="none", extra_body={"cache_control": MARK})
    marks = [
        [block.get("cache_control") for block in blocks]
        for blocks in (got["system"], *(turn["content"] for turn in got["messages"]), got["tools"])
    ]
    assert marks == [[LONG, MARK], [MARK, None], [None, MARK], [MARK], [MARK], [LONG], [MARK, LONG]]
    assert got["cache_control"] == MARK
    assert got["messages"][2]["content"][0] == {
        "type": "tool_result", "tool_use_id": "c1", "content": "4", "cache_control": MARK
    }  # fmt: skip


async def test_marks_of_a_result_of_several_parts_and_of_the_message_itself_reach_it(world: VendorWorld) -> None:
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "4", "cache_control": MARK}]
    messages = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": parts, "cache_control": LONG}]
    result = (await sent_to_claude(world, messages))["messages"][-1]["content"][0]
    assert [part.get("cache_control") for part in result["content"]] == [None, MARK]
    assert result["cache_control"] == LONG


@pytest.mark.parametrize(
    ("messages", "roles", "last"),
    [
        ([{"role": "system", "content": "Greet."}], ["user"], SILENCE),
        ([*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": ""}], ["user", "assistant", "user"], SILENCE),
        ([*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": " \n"}], ["user", "assistant", "user"], SILENCE),
        ([*HELLO, {"role": "assistant", "content": "  "}, {"role": "user", "content": "x"}], ["user"], "x"),
        ([*HELLO, {"role": "assistant", "content": "It is  \n"}], ["user", "assistant"], "It is"),
        ([{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}], ["user", "assistant", "user"], "x"),
        ([{"role": "user", "content": ""}], ["user"], SILENCE),
        ([{"role": "user", "content": [{"type": "text", "text": "\t"}, {"type": "text", "text": "x"}]}], ["user"], "x"),
    ],
    ids=["system", "empty", "blank", "blank-assistant", "prefill", "assistant-first", "nothing", "blank-part"],
)  # fmt: skip
async def test_conversations_that_anthropics_service_refuses_are_made_acceptable(
    world: VendorWorld, messages: list[Any], roles: list[str], last: str
) -> None:
    got = await sent_to_claude(world, messages)
    assert [turn["role"] for turn in got["messages"]] == roles
    assert got["messages"][-1]["content"][-1]["text"] == last


async def test_a_conversation_without_any_message_is_the_vendors_to_refuse(world: VendorWorld) -> None:
    async with world.openai_agent() as agent:
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            await agent.chat.completions.create(model=CLAUDE, messages=[])


async def test_an_efforts_worth_of_thinking_reaches_a_server_of_chat_completions(world: VendorWorld) -> None:
    budgets = {1024: "low", 5000: "medium", 10_000: "high"}
    async with world.anthropic_agent() as agent:
        for budget, effort in budgets.items():
            thinking: Any = {"type": "enabled", "budget_tokens": budget}
            await agent.messages.create(model=CHAT_ONLY, max_tokens=16_000, messages=HELLO, thinking=thinking)
            assert world.openai.received[-1].body["reasoning_effort"] == effort
            assert "thinking" not in world.openai.received[-1].body
        await agent.messages.create(model=CHAT_ONLY, max_tokens=9, messages=HELLO, thinking={"type": "disabled"})
        assert "reasoning_effort" not in world.openai.received[-1].body


async def test_a_backends_own_headers_are_sent_with_every_request_and_the_callers_give_way(world: VendorWorld) -> None:
    headers = {"HTTP-Referer": "https://app.example.com", "X-Title": "Support", "OpenAI-Beta": "ours"}
    await lead(
        world,
        "routed",
        "routed",
        world.openai.url,
        VENDOR_MODEL,
        key_name="openai",
        apis=EVERY_OPENAI_API,
        headers=headers,
    )
    async with world.openai_agent() as agent:
        response = await agent.responses.create(model="routed", input="hello", extra_headers={"OpenAI-Beta": "theirs"})
        await agent.responses.retrieve(response.id)
    for one in world.openai.received:
        got = {name.lower(): value for name, value in one.headers.items()}
        assert {name: got[name.lower()] for name in headers} == headers
        assert got["authorization"].startswith("Bearer ")
    assert len(world.openai.received) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", "Bearer x"),
        ("x-api-key", "x"),
        ("HOST", "x"),
        ("content-length", "3"),
        ("two words", "x"),
        ("", "x"),
        ("x-a", "line\nbreak"),
        ("x-a", "\u00e9"),
        ("x-a", "x" * 1025),
    ],
)
async def test_headers_of_the_proxy_itself_and_malformed_ones_are_refused(
    world: VendorWorld, name: str, value: str
) -> None:
    with pytest.raises(ArgumentInvalid, match=r"backend\.headers"):
        await world.proxy.register("bad", world.openai.url, headers={name: value})


async def test_parameters_that_a_backend_cannot_express_are_dropped_where_the_operator_says_so(
    world: VendorWorld,
) -> None:
    traits = {"dialect": backend_pb2.DIALECT_ANTHROPIC, "key_name": "anthropic", "drop_params": True}
    await lead(world, "lenient", "lenient", world.anthropic.url, ANTHROPIC_MODEL, **traits)
    wide: Any = {"n": 2, "logit_bias": {"5": 1}, "frequency_penalty": 0.5, "response_format": {"type": "json_object"}}
    wide |= {"tools": [{"type": "custom", "custom": {"name": "sh"}}], "tool_choice": "required"}
    async with world.openai_agent() as agent:
        raw = await agent.chat.completions.with_raw_response.create(model="lenient", messages=HELLO, **wide)
        assert raw.parse().choices[0].message.content == "You said: hello"
        named = {"n", "logit_bias", "frequency_penalty", "response_format", "tools"}
        assert set(raw.headers["x-fulmen-dropped"].split(", ")) == named
        with pytest.raises(openai.BadRequestError, match=r"logit_bias \(no equivalent\)"):
            await agent.chat.completions.create(model=CLAUDE, messages=HELLO, **wide)
        sound: Any = [
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
        ]
        with pytest.raises(openai.BadRequestError, match="input_audio"):
            await agent.chat.completions.create(model="lenient", messages=sound)
        plain = await agent.chat.completions.with_raw_response.create(model=GPT, messages=HELLO)
        assert "x-fulmen-dropped" not in plain.headers


async def test_a_responses_agent_with_hosted_tools_is_served_where_parameters_are_dropped(world: VendorWorld) -> None:
    apis = [backend_pb2.API_CHAT_COMPLETIONS]
    await lead(
        world, "lenient", "lenient", world.openai.url, VENDOR_MODEL, key_name="openai", apis=apis, drop_params=True
    )
    tools: Any = [{"type": "web_search"}, {"type": "function", **FUNCTION, "strict": False}]
    async with world.openai_agent() as agent:
        raw = await agent.responses.with_raw_response.create(
            model="lenient", input="hello", tools=tools, truncation="auto", store=True, tool_choice="none"
        )
        assert raw.parse().output_text == "You said: hello"
        assert set(raw.headers["x-fulmen-dropped"].split(", ")) == {"tools", "truncation"}
        with pytest.raises(openai.BadRequestError, match="Send the complete input"):
            await agent.responses.create(model="lenient", input="hello", previous_response_id="resp_1")
    [tool] = world.openai.received[-1].body["tools"]
    assert tool["function"]["name"] == "calculate"


async def test_a_messages_agent_with_the_vendors_tools_is_served_where_parameters_are_dropped(
    world: VendorWorld,
) -> None:
    apis = [backend_pb2.API_CHAT_COMPLETIONS]
    await lead(
        world, "lenient", "lenient", world.openai.url, VENDOR_MODEL, key_name="openai", apis=apis, drop_params=True
    )
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    async with world.anthropic_agent() as agent:
        raw = await agent.messages.with_raw_response.create(
            model="lenient", max_tokens=64, messages=HELLO, tools=tools, tool_choice={"type": "auto"}
        )
    assert raw.headers["x-fulmen-dropped"] == "tools"
    assert not {"tools", "tool_choice"} & world.openai.received[-1].body.keys()


async def test_a_client_whose_base_url_lacks_the_version_is_served(world: VendorWorld) -> None:
    attempt, key = world.proxy.attempt()
    for base_url in (world.anthropic_url, f"{world.anthropic_url}/{attempt}"):
        async with world.openai_agent(key, base_url=base_url) as agent:
            assert (await agent.chat.completions.create(model=GPT, messages=HELLO)).choices
            assert (await agent.responses.create(model=GPT, input="hello")).output_text
            assert (await agent.embeddings.create(model=GPT, input="hello")).data
            assert [model.id async for model in agent.models.list()]
            assert (await agent.models.retrieve(GPT)).id == GPT
