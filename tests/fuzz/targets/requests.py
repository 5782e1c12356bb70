"""Requests of callers of the proxy: parsed, translated, and sealed ids opened. A line names the API, then the body."""

from __future__ import annotations

import contextlib
import json
import random

import msgspec
import msgspec.structs

from fulmen.errors import FulmenError
from fulmen_llm_proxy.apis.api import ApiName, asks_for_stream
from fulmen_llm_proxy.apis.registry import APIS
from fulmen_llm_proxy.apis.usage import tokens_to_reserve
from fulmen_llm_proxy.backends.call_plan import plan_call
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.responses.response_ids import ResponseIds, StoredResponseRouter
from fulmen_llm_proxy.capture.call_span import sampling_of, span_of
from fulmen_llm_proxy.routing.balancing import CallAffinity
from fulmen_llm_proxy.routing.codec import parse_overrides
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import Backend, Choice, Route, Target, Variant
from tests.fuzz.mutation import mutate_json
from tests.fuzz.target import PureTarget
from tests.support.llm_proxy.finished_calls import finished
from tests.support.llm_proxy.rogue_world import REQUESTS

_TARGET = Target(backend_id="b", model="m", policy="p", policy_version=1)
_IDS = ResponseIds(lambda: [b"secret"])
_SERVED = (ApiName.CHAT, ApiName.MESSAGES, None)

_PARTS = [
    {"type": "text", "text": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
    {"type": "thinking", "thinking": "t", "signature": "s"},
]  # fmt: skip
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": _PARTS},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "t", "content": "r"},
]
_MORE = {
    "stream": True, "max_tokens": 5, "temperature": 0.5, "top_p": 1, "n": 1, "stop": ["x"], "seed": 1, "user": "u",
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "reasoning_effort": "low", "logprobs": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, "stream_options": {"include_usage": True},
    "metadata": {"user_id": "u"}, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
    "previous_response_id": _IDS.sealed("r", backend_id="b", project="projects/default"), "store": True, "conversation": {"id": "c"},
    "instructions": "i", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
}  # fmt: skip
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
]


def run(data: bytes) -> None:
    """Reads a request as the pipeline does, for a backend of each API, and records it."""
    head, _, body = data.partition(b"\n")
    name = head.decode("latin-1")
    api = APIS[ApiName(name)] if name in set(ApiName) else APIS[ApiName.CHAT]
    asks_for_stream(body)
    with contextlib.suppress(FulmenError):
        parse_overrides(body.decode("utf-8", "replace"))
    request = api.parse(body)
    tokens_to_reserve(request, assumed_completion=100)
    CallAffinity("attempt", request.fields)
    request, _ = StoredResponseRouter(_IDS).resolve(request, "projects/default")
    call = msgspec.structs.replace(finished({}, None, api=api, model=request.model), fields=request.fields)
    span_of(call, None, sampling_of(request.fields))
    refused: FulmenError | None = None
    for served in _SERVED:
        backend = Backend(
            id="b",
            base_url="http://b/v1",
            apis=frozenset({served or api.name}),
            engine=Engine.VLLM,
            returns_token_ids=True,
        )
        variant = Variant(targets=(_TARGET,), backends=(backend,), replicas=(), weight=1, seed=0)
        choice = Choice(route=Route(model="m", targets=(_TARGET,)), variant=variant, target=_TARGET, backend=backend)
        try:
            # Numbers are passed on as they came, also those beyond a float.
            json.loads(plan_call(request, choice, overrides={}, attributed=True).body)
        except FulmenError as error:
            refused = error
        except RecursionError:
            pass  # of this decoding only
    if refused is not None:
        raise refused


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes the JSON of the body, or the API."""
    head, _, body = data.partition(b"\n")
    if rng.random() < 0.02:
        head = rng.choice(list(ApiName)).encode()
    return head + b"\n" + mutate_json(body, rng)


def _seeds() -> list[bytes]:
    found = []
    for api in APIS.values():
        fields = {**REQUESTS[f"/v1{api.path}"], "model": "m"}
        full = {**fields, **_MORE} | (
            {"messages": _TURNS} if "messages" in fields else {"input": _ITEMS} if "input" in fields else {}
        )
        found += [f"{api.name}\n".encode() + json.dumps(each).encode() for each in (fields, full)]
    return found


TARGET = PureTarget(run=run, seeds=_seeds(), mutate=mutate, refusals=(FulmenError, Refused))
