"""The unmodified OpenAI package of Node.js against the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.llm_proxy import node_agent
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL
from tests.support.llm_proxy.openai_world import AZURE, CHAT_ONLY, GPT, OpenAiWorld, openai_world
from tests.support.llm_proxy.vendors.openai import EMBEDDING, Fault

CALLS = [["add", {"input": "hello"}], ["multiply", {"input": "hello"}]]


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[OpenAiWorld]:
    """Yields a proxy before four backends."""
    async with openai_world(store, backend) as running:
        yield running


async def play(root: Path, world: OpenAiWorld, key: str, *, failing: bool = False) -> dict[str, Any]:
    """Runs the agent; returns what it saw."""
    return await node_agent.play(
        root,
        "openai_agent.mjs",
        "openai",
        failing=failing,
        PROXY_URL=world.proxy.url,
        PROXY_KEY=key,
        VENDOR_MODEL=GPT,
        CHAT_MODEL=CHAT_ONLY,
        CAPTURED_MODEL=MODEL,
    )


async def test_a_node_agent_uses_every_api(world: OpenAiWorld, repository_root: Path) -> None:
    attempt, key = world.proxy.attempt()
    seen = await play(repository_root, world, key)
    await world.proxy.flush(attempt)
    answer = {"text": "You said: hello", "last": "response.completed", "calls": CALLS}
    refused = {"retryAfter": None}
    assert seen == {
        "chat": ["You said: hello", "You said: hello"],
        "captured": ["You said: hello", "You said: hello"],
        "toolCalls": CALLS,
        "responses": answer,
        "translated": answer,
        "completion": "You said: one",
        "embedding": EMBEDDING,
        "models": sorted([GPT, AZURE, CHAT_ONLY, MODEL]),
        "model": CHAT_ONLY,
        "azure": "You said: hello",
        "unknownModel": {"name": "NotFoundError", "status": 404, "code": "route_not_found"} | refused,
        "badRequest": {"name": "BadRequestError", "status": 400, "code": "argument_invalid"} | refused,
    }
    captured = [record for _, record in world.store.spans(attempt) if record is not None]
    assert len(captured) == 2
    assert all(record.usable for record in captured)


async def test_a_node_agent_is_told_errors_as_the_vendor_tells_them(world: OpenAiWorld, repository_root: Path) -> None:
    fault = Fault(status=429, code="rate_limit_exceeded", headers={"Retry-After": "7"})
    world.vendor.faults.append(fault)
    world.vendor.error_after = 2
    seen = await play(repository_root, world, world.key(), failing=True)
    assert seen["refused"] == {
        "name": "RateLimitError",
        "status": 429,
        "code": "rate_limit_exceeded",
        "retryAfter": "7",
    }
    assert seen["broken"]["name"] == "APIError"
