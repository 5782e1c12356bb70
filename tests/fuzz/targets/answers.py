"""Answers of backends: read, translated, decoded, assembled, packed, and read again as a trainer reads them.

An input is a line `caller served stream engine`, then the answer's body or events.
"""

from __future__ import annotations

import json
import random
from itertools import product

from fulmen.errors import BackendUnavailable
from fulmen.store.v1 import span_pb2
from fulmen.trajectories import conversations, trajectory
from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.errors import error_document, refusal_of
from fulmen_llm_proxy.apis.registry import APIS
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.apis.usage import token_counts
from fulmen_llm_proxy.backends.call_plan import CallPlan, plan_call
from fulmen_llm_proxy.capture.span_codec import SpanCodec
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import Backend, Choice, Route, Target, Variant
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.target import PureTarget, check_text, text_of
from tests.support.llm_proxy.finished_calls import finished
from tests.support.llm_proxy.rogue_backend import EVENTS, WHOLE
from tests.support.llm_proxy.rogue_world import REQUESTS

_TARGET = Target(backend_id="b", model="m", policy="p", policy_version=1)
_CODEC = SpanCodec(instance_id="fuzz")
WAYS = [
    *((name, name) for name in ApiName),
    (ApiName.MESSAGES, ApiName.CHAT),
    (ApiName.RESPONSES, ApiName.CHAT),
    (ApiName.CHAT, ApiName.MESSAGES),
    (ApiName.RESPONSES, ApiName.MESSAGES),
]
_TOOLS = {
    "index": 0,
    "message": {
        "role": "assistant", "content": None, "reasoning_content": "why",
        "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    "finish_reason": "tool_calls", "token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1}, {"logprob": -2}]},
    "weight_versions": [{"version": 1, "start": 0, "end": 2}],
}  # fmt: skip


def _plan(head: str) -> tuple[CallPlan, bool]:
    """Returns the plan of the call that a line describes; of a plain chat call for any other line."""
    words = head.split(" ")
    try:
        caller, served, stream, engine = ApiName(words[0]), ApiName(words[1]), words[2] == "1", Engine(words[3])
    except (ValueError, IndexError):
        caller, served, stream, engine = ApiName.CHAT, ApiName.CHAT, False, Engine.UNKNOWN
    backend = Backend(id="b", base_url="http://b/v1", apis=frozenset({served}), returns_token_ids=True, engine=engine)
    variant = Variant(targets=(_TARGET,), backends=(backend,), replicas=(), weight=1, seed=0)
    choice = Choice(route=Route(model="m", targets=(_TARGET,)), variant=variant, target=_TARGET, backend=backend)
    api = APIS[caller]
    fields = {**REQUESTS[f"/v1{api.path}"], "model": "m", "stream": stream}
    request = api.parse(json.dumps(fields).encode())
    return plan_call(request, choice, overrides={}, attributed=True), stream


def run(data: bytes) -> None:
    """Reads an answer, records the call, and reads the record."""
    head, _, body = data.partition(b"\n")
    plan, stream = _plan(head.decode("latin-1"))
    reader = plan.reader
    try:
        if stream and plan.stream:
            splitter = EventSplitter(1 << 20)
            events = splitter.feed(body)
            rest = splitter.rest()
            assert b"".join([*events, rest]) == body
            for event in [*events, *([rest] if rest else [])]:
                reader.event(event)
            reader.end()
        else:
            plan.whole(body)
    except BackendUnavailable as refusal:
        check_text(text_of(refusal))
    except RecursionError:
        pass  # the pipeline refuses such an answer
    error_document(refusal_of(500, body), plan.caller_api.dialect)
    try:
        token_counts(reader.collected.usage)
    except (ValueError, RecursionError):
        reader.collected.malformed = True
    call = finished(
        {"messages": [{"role": "user", "content": "hi"}]}, reader.collected, api=plan.api, captured=plan.captured
    )
    [packed] = _CODEC.pack([_CODEC._encode(call)])  # `encode` would hide an error behind an empty record
    read = trajectory([span_pb2.SpanChunk.FromString(packed.chunk)])
    conversations(read)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes the JSON of a body or of an event, the order of events, or the way of the call."""
    head, _, body = data.partition(b"\n")
    if rng.random() < 0.02:
        caller, served = rng.choice(WAYS)
        head = f"{caller} {served} {rng.randrange(2)} {rng.choice(list(Engine))}".encode()
    if b"data:" not in body:
        return head + b"\n" + mutate_json(body, rng)
    if rng.random() < 0.15:
        return head + b"\n" + mutate_bytes(body, rng)
    events = body.split(b"\n\n")
    place = rng.randrange(len(events))
    match rng.randrange(8):
        case 0:
            events.insert(rng.randrange(len(events)), events[place])
        case 1:
            del events[place]
        case _:
            first, mark, document = events[place].partition(b"data: ")
            events[place] = first + mark + mutate_json(document, rng).replace(b"\n", b" ")
    return head + b"\n" + b"\n\n".join(events)


def _seeds() -> list[bytes]:
    seeds = []
    for (caller, served), engine in product(WAYS, (Engine.UNKNOWN, Engine.SGLANG)):
        path = f"/v1{APIS[served].path}"
        wholes = [WHOLE[path]]
        if served is ApiName.CHAT:
            wholes.append({**WHOLE[path], "choices": [_TOOLS, {**_TOOLS, "index": 1}]})
        for whole in wholes:
            body = json.dumps(whole).encode()
            seeds += [f"{caller} {served} {stream} {engine}\n".encode() + body for stream in (0, 1)]
        if path in EVENTS:
            events = b"".join(EVENTS[path])
            seeds.append(f"{caller} {served} 1 {engine}\n".encode() + events)
            if served is ApiName.CHAT:
                head = {name: value for name, value in WHOLE[path].items() if name not in ("choices", "usage")}
                piece = {"index": 0, "delta": _TOOLS["message"], "finish_reason": None}
                call = json.dumps({**head, "choices": [piece]}).encode()
                again = json.dumps({**head, "choices": [{**piece, "finish_reason": "stop"}]}).encode()
                seeds.append(
                    f"{caller} {served} 1 {engine}\n".encode()
                    + b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (call, again)
                )
    return seeds


TARGET = PureTarget(run=run, seeds=_seeds(), mutate=mutate)
