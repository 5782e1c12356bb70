"""The agents of the benchmark, as somebody would write them; run by Fulmen's runner and by the peer's."""

from __future__ import annotations

import os
from typing import Any

MODEL = "slow"
CALLS = 3


async def trivial(task: Any) -> float:
    """Does nothing but answer."""
    return 1.0


async def waits_for_its_model(task: Any) -> float:
    """Asks a slow model a few times, one call after the other, as agents do."""
    from openai import AsyncOpenAI  # what it needs is the agent's own affair: a trivial one does not load it

    async with AsyncOpenAI(base_url=os.environ["BENCH_MODEL_URL"], api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": str(task)}]
        for _ in range(CALLS):
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    return 1.0


def waits_in_a_thread(task: Any) -> float:
    """The same as a plain, blocking function."""
    from openai import OpenAI

    with OpenAI(base_url=os.environ["BENCH_MODEL_URL"], api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": str(task)}]
        for _ in range(CALLS):
            answer = client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    return 1.0
