"""A hostile backend behind the proxy: answers and events of any kind to calls of attempts, which are captured.

An input is that of the target `answers`.
"""

from __future__ import annotations

import asyncio
import json
import random

from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.registry import APIS
from tests.fuzz.target import Leak, check_text
from tests.fuzz.targets import answers
from tests.fuzz.world import LiveTarget, LiveWorld
from tests.support.llm_proxy.rogue_world import PROMPT, REQUESTS

LIMIT_S = 20.0


async def send(world: LiveWorld, data: bytes) -> None:
    """Makes one call that the backend answers with the input."""
    head, _, body = data.partition(b"\n")
    words = head.decode("latin-1").split(" ")
    if len(words) != 4 or (words[0], words[1]) not in answers.WAYS:
        return
    caller, served, stream, engine = ApiName(words[0]), ApiName(words[1]), words[2] == "1", words[3]
    number = next(world.calls)
    world.answers[number] = b"data:" in body, body or b" "
    text = f"fuzz-call-{number}"
    path = f"/v1{APIS[caller].path}"
    model = f"{served}-{engine}" if engine in ("unknown", "sglang", "vllm") else f"{served}-unknown"
    fields = json.loads(json.dumps(REQUESTS[path]).replace(PROMPT, text))
    headers = {"authorization": f"Bearer {world.keys[number % len(world.keys)]}"}
    url = f"http://127.0.0.1:{world.ports['llm_proxy_http']}{path}"
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            world.http.post(
                url, data=json.dumps({**fields, "model": model, "stream": stream}), headers=headers
            ) as answer,
        ):
            received = await answer.read()
    finally:
        del world.answers[number]
    if answer.status in (401, 403):
        raise Leak(f"the call tried nothing: {received[:200]!r}")
    if answer.status == 500 or (answer.status == 404 and b"model" in received):
        raise Leak(f"status {answer.status}: {received[:200]!r}")
    if received != body:
        own = received[-2000:] if answer.status != 200 or stream else b""
        if b'"error"' in own:
            check_text(own.decode("latin-1"))


def mutate(world: LiveWorld, data: bytes, rng: random.Random) -> bytes:
    """Changes an answer as `answers` does."""
    return answers.mutate(data, rng)


TARGET = LiveTarget(
    seeds=lambda world: answers.TARGET.seeds, mutate=mutate, send=send, services=("llm_proxy", "store"), workers=16
)
