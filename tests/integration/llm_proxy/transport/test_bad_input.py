"""Whatever body a caller sends to whatever API: one typed error in its own dialect, or the answer; nothing is stuck."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen_llm_proxy.apis.registry import BY_PATH
from tests.support.llm_proxy.rogue_backend import CHAT, COMPLETIONS, COUNT, EMBEDDINGS, MESSAGES, RESPONSES
from tests.support.llm_proxy.rogue_world import (
    CHAT_ONLY,
    CLAUDE,
    DEADLINE_S,
    NATIVE,
    REQUESTS,
    TINY,
    WAYS,
    Answer,
    RogueWorld,
    bounded,
    request_of,
    rogue_fixtures,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_REQUEST_BYTES = 400_000
DEPTH = 100_000
JSON = dict[str, Any]


shared, world = rogue_fixtures(max_request_bytes=MAX_REQUEST_BYTES, retry_deadline_s=0.2)


def within(value: bytes) -> Callable[[bytes], bytes]:
    """Returns what puts a value into a request, in a field that the proxy does not know."""
    return lambda valid: valid[:-1] + b', "x_field": ' + value + b"}"


NO_REQUESTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda valid: b"",
    "blank": lambda valid: b" \n",
    "no JSON": lambda valid: b"not json",
    "cut": lambda valid: valid[:-2],
    "a list": lambda valid: b"[" + valid + b"]",
    "a string": lambda valid: json.dumps(valid.decode()).encode(),
    "a number": lambda valid: b"1",
    "null": lambda valid: b"null",
    "two documents": lambda valid: valid + valid,
    "deep, open": within(b"[" * DEPTH),
    "deep, closed": within(b"[" * DEPTH + b"]" * DEPTH),
    "deep objects": lambda valid: b'{"a":' * (DEPTH // 2),
    "NaN": within(b"NaN"),
    "infinite": within(b"-Infinity"),
    "a key without quotes": within(b"{a: 1}"),
    "a comment": within(b"/* */ 1"),
    "no UTF-8 in a value": within(b'"\xff\xfe"'),
    "no UTF-8 in a key": lambda valid: valid[:-1] + b', "\xff": 1}',
    "an overlong encoding": within(b'"\xc0\xaf"'),
    "an encoded surrogate": within(b'"\xed\xa0\x80"'),
    "a lone surrogate": within(b'"\\ud800"'),
    "a lone low surrogate": within(b'"\\udc00 x"'),
    "a NUL in a string": within(b'"\x00"'),
    "a NUL after it": lambda valid: valid + b"\x00",
    "a control character": within(b'"\x01"'),
    "UTF-16": lambda valid: valid.decode().encode("utf-16"),
    "a byte order mark": lambda valid: b"\xef\xbb\xbf" + valid,
}


@pytest.mark.parametrize("make", NO_REQUESTS.values(), ids=NO_REQUESTS.keys())
async def test_what_is_no_request_is_told_in_the_callers_dialect_and_goes_nowhere(
    world: RogueWorld, make: Callable[[bytes], bytes]
) -> None:
    attempt, key = world.proxy.attempt()
    before = len(world.backend.asked)
    for path, model in WAYS:
        answer = await world.post(path, make(json.dumps(request_of(path, model)).encode()), key)
        assert (answer.status, world.told(path, answer)) == (400, "argument_invalid"), (path, answer.body)
    assert len(world.backend.asked) == before
    summary = await world.is_well(attempt)
    assert summary is not None
    assert (summary.call_count, summary.infra_failure_count) == (0, 0)


async def test_what_is_no_request_is_refused_over_grpc_too(world: RogueWorld) -> None:
    async with open_channel(f"127.0.0.1:{world.proxy.parts.server.port}", token=world.key()) as channel:
        stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
        for make in NO_REQUESTS.values():
            for path, model in NATIVE.items():
                body = make(json.dumps(request_of(path, model)).encode())
                with pytest.raises(ArgumentInvalid):
                    await stub.Complete(
                        completion_service_pb2.CompleteRequest(path=path, body_json=body), timeout=DEADLINE_S
                    )
                asked = completion_service_pb2.StreamCompleteRequest(path=path, body_json=body)
                with pytest.raises(ArgumentInvalid):
                    [message async for message in stub.StreamComplete(asked, timeout=DEADLINE_S)]


WRONG: dict[str, JSON] = {
    CHAT: {
        "model": 1, "stream": "yes", "stream_options": [1], "max_tokens": "many", "max_completion_tokens": 1.5,
        "logprobs": 2, "return_token_ids": {},
    },
    COMPLETIONS: {
        "model": None, "stream": 1, "stream_options": "all", "max_tokens": [], "logprobs": True, "return_token_ids": "",
    },
    RESPONSES: {"model": [], "stream": 0, "max_output_tokens": "9"},
    EMBEDDINGS: {"model": {}},
    MESSAGES: {"model": 1, "stream": "true", "max_tokens": "9"},
    COUNT: {"model": False},
}  # fmt: skip
"""Every field that the proxy itself reads, of a wrong type."""

REQUIRED = {
    CHAT: ("model", "messages"), COMPLETIONS: ("model", "prompt"), RESPONSES: ("model",), EMBEDDINGS: ("model", "input"),
    MESSAGES: ("model", "messages"), COUNT: ("model", "messages"),
}  # fmt: skip


@pytest.mark.parametrize("path", NATIVE)
async def test_all_that_is_wrong_with_a_request_is_told_at_once(world: RogueWorld, path: str) -> None:
    wrong, missing = WRONG[path], [name for name in REQUIRED[path] if name not in WRONG[path]]
    answer = await world.post(path, wrong, world.key())
    assert (answer.status, world.told(path, answer)) == (400, "argument_invalid")
    told = json.loads(answer.body)["error"]["message"]
    for name in (*wrong, *missing):
        assert f"\n  {name}: " in told, told
    async with open_channel(f"127.0.0.1:{world.proxy.parts.server.port}", token=world.key()) as channel:
        request = completion_service_pb2.CompleteRequest(path=path, body_json=json.dumps(wrong).encode())
        with pytest.raises(ArgumentInvalid) as raised:
            await completion_service_pb2_grpc.CompletionServiceStub(channel).Complete(request, timeout=DEADLINE_S)
    assert {violation.field for violation in raised.value.violations} == {*wrong, *missing}


@pytest.mark.parametrize("path", NATIVE)
async def test_each_wrong_field_is_refused_by_itself(world: RogueWorld, path: str) -> None:
    for name, value in WRONG[path].items():
        answer = await world.post(path, request_of(path, NATIVE[path]) | {name: value}, world.key())
        assert (answer.status, world.told(path, answer)) == (400, "argument_invalid"), name
    for name in REQUIRED[path]:
        request = request_of(path, NATIVE[path])
        del request[name]
        answer = await world.post(path, request, world.key())
        assert (answer.status, world.told(path, answer)) == (400, "argument_invalid"), name


TRANSLATED_WRONG = [
    (path, model, name, value)
    for path, model, names in (
        (MESSAGES, CHAT_ONLY, ("messages", "system", "tools", "tool_choice", "stop_sequences", "metadata")),
        (RESPONSES, CHAT_ONLY, ("input", "instructions", "tools", "tool_choice", "text", "reasoning")),
        (CHAT, CLAUDE, ("messages", "tools", "tool_choice", "stop", "response_format", "stream_options")),
        (MESSAGES, TINY, ("messages", "system", "tools")),
    )
    for name in names
    for value in (7, [7], {"type": 7}, [[[]]], "\x00")
]


async def test_a_field_that_a_translation_cannot_read_is_the_callers_fault(world: RogueWorld) -> None:
    for path, model, name, value in TRANSLATED_WRONG:
        answer = await world.post(path, request_of(path, model) | {name: value}, world.key())
        assert answer.status in (200, 400), (path, name, value, answer.body)
        if answer.status == 400:
            world.told(path, answer)


@pytest.mark.parametrize("depth", [880, 920, 950, 960, 965, 970, 975, 980, 985, 990])
async def test_what_is_nested_as_deep_as_can_be_read_is_passed_on_or_refused(world: RogueWorld, depth: int) -> None:
    attempt, key = world.proxy.attempt()
    for path, model in WAYS:
        for name in ("x_field", "messages", "input", "tools", "metadata"):
            request = {key: value for key, value in request_of(path, model).items() if key != name}
            body = json.dumps(request).encode()[:-1] + b', "%b": %b%b}' % (name.encode(), b"[" * depth, b"]" * depth)
            answer = await world.post(path, body, key)
            assert answer.status in (200, 400), (path, model, name, answer.body)
            if answer.status == 400:
                world.told(path, answer)
    await world.is_well(attempt)


async def test_unknown_fields_reach_the_backend_byte_for_byte(world: RogueWorld) -> None:
    value = (
        rb'{"b" : 1.50e+3,"a":[1 ,2.0, -0, 1E400],"b":2, "\u00e9\/": "\ud83d\ude00\u0000", "n":1' + b"0" * 400 + b"}"
    )
    for path, model in (*NATIVE.items(), (MESSAGES, CHAT_ONLY), (CHAT, TINY)):
        body = within(value)(json.dumps(request_of(path, model)).encode())
        answer = await world.post(path, body, world.key())
        assert answer.status == 200, answer.body
        assert b'"x_field":' + value in world.backend.asked[-1].body, path


async def test_of_a_field_that_comes_twice_the_last_counts_and_the_backend_sees_no_other(world: RogueWorld) -> None:
    for path, model in NATIVE.items():
        body = json.dumps({"model": "nobodys", "user": "first"} | REQUESTS[path]).encode()
        body = body[:-1] + b', "model": "%b", "user": "last"}' % model.encode()
        answer = await world.post(path, body, world.key())
        assert answer.status == 200
        pairs = json.loads(world.backend.asked[-1].body, object_pairs_hook=list)
        assert [value for name, value in pairs if name == "user"] == ["last"]
        assert [value for name, value in pairs if name == "model"] == [model]


@pytest.mark.parametrize("number", ["-1", "0", "9" * 18, "9" * 30, "9" * 5000, "1e3", "1e999", "-0"], ids=len)
async def test_a_number_of_any_size_is_passed_on_or_refused_and_settled(world: RogueWorld, number: str) -> None:
    attempt, key = world.proxy.attempt()
    calls = 0
    for path, model in WAYS:
        names = (
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "n",
            "seed",
            "temperature",
            "top_k",
            "logprobs",
        )
        for name in names:
            request = {key: value for key, value in request_of(path, model).items() if key != name}
            body = json.dumps(request).encode()[:-1] + f', "{name}": {number}}}'.encode()
            answer = await world.post(path, body, key)
            assert answer.status in (200, 400), (path, name, answer.body)
            calls += answer.status == 200
            if answer.status == 400:
                world.told(path, answer)
    summary = await world.is_well(attempt)
    assert summary is not None
    assert summary.infra_failure_count == 0
    assert calls > len(WAYS)


async def test_a_models_name_may_be_anything_and_is_never_told_back_whole(world: RogueWorld) -> None:
    for path in NATIVE:
        for model in ("", "x" * 100_000, "\x00", "../gpt", "%s%s%n", "{0}", "\u202e", "é" * 500):
            answer = await world.post(path, request_of(path, model), world.key())
            assert (answer.status, world.told(path, answer)) == (404, "route_not_found")
            assert len(answer.body) < 2000


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["user", "tool", "text", "auto", "function", "json_object", "base64"])
)  # fmt: skip
NAMES = st.sampled_from(
    [
        *("role", "content", "type", "text", "tools", "tool_choice", "function", "name", "parameters", "arguments"),
        *("tool_calls", "id", "source", "data", "image_url", "url", "input", "output", "call_id", "messages", "stream"),
        *("max_tokens", "logprobs", "stream_options", "include_usage", "n", "stop", "system", "metadata", "model"),
    ]
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=10
)
FIELDS = st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=4)


def checked(world: RogueWorld, path: str, answer: Answer) -> None:
    assert answer.status in (200, 400, 404, 501), (path, answer.status, answer.body)
    if answer.status != 200:
        error = json.loads(answer.body)["error"]
        assert isinstance(error["message"], str)
        assert BY_PATH[path].dialect == "openai" or json.loads(answer.body)["type"] == "error"
        assert error["code"] != "internal", answer.body


@pytest.mark.parametrize(("path", "model"), WAYS)
@bounded
@given(fields=FIELDS, seed=st.integers(0, 2**32), edits=st.integers(0, 3))
async def test_any_body_is_answered_or_refused(
    world: RogueWorld, path: str, model: str, fields: JSON, seed: int, edits: int
) -> None:
    body = bytearray(json.dumps(request_of(path, model) | {k: v for k, v in fields.items() if k != "model"}).encode())
    chance = random.Random(seed)
    for _ in range(edits):
        place = chance.randrange(len(body))
        match chance.randrange(4):
            case 0:
                body[place] = chance.randrange(256)
            case 1:
                del body[place : place + chance.randrange(1, 9)]
            case 2:
                body[place:place] = chance.choice([b'"', b"{", b"]", b",", b"\\", b"\xf0", b"null", b"1e9", b"\\u00"])
            case _:
                body[place:] = body[:place]
        if not body:
            body = bytearray(b"{}")
    checked(world, path, await world.post(path, bytes(body), world.key()))
