"""The unmodified Anthropic package of Node.js against the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.llm_proxy import node_agent
from tests.support.llm_proxy.anthropic_world import CLAUDE, AnthropicWorld, anthropic_world
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL

SAID = "You said: hello"


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[AnthropicWorld]:
    """Yields a proxy before the vendor and an engine."""
    async with anthropic_world(store, backend, retry_deadline_s=0) as running:
        yield running


async def play(root: Path, world: AnthropicWorld, key: str, *, failing: bool = False) -> dict[str, Any]:
    """Runs the agent; returns what it saw."""
    return await node_agent.play(
        root,
        "anthropic_agent.mjs",
        "@anthropic-ai/sdk",
        failing=failing,
        PROXY_URL=world.url,
        PROXY_KEY=key,
        VENDOR_MODEL=CLAUDE,
        CAPTURED_MODEL=MODEL,
    )


async def test_a_node_agent_talks_streams_and_calls_tools(world: AnthropicWorld, repository_root: Path) -> None:
    attempt, key = world.proxy.attempt()
    seen = await play(repository_root, world, key)
    await world.proxy.flush(attempt)
    calls = [["calculate", "hello"], ["look_up", "hello"]]
    assert seen == {
        "vendor": {"whole": SAID, "streamed": SAID, "pieces": 4, "stop": "end_turn"},
        "captured": {"whole": SAID, "streamed": SAID, "pieces": len(SAID), "stop": "end_turn"},
        "vendorTools": {"calls": calls, "stop": "tool_use", "last": "You said: 4"},
        "capturedTools": {"calls": calls[:1], "stop": "tool_use", "last": "You said: 4"},
        "counted": True,
        "notCounted": {"name": "NotImplementedError", "status": 501, "type": "api_error", "retryAfter": None},
        "unknownModel": {"name": "NotFoundError", "status": 404, "type": "not_found_error", "retryAfter": None},
        "badRequest": {"name": "BadRequestError", "status": 400, "type": "invalid_request_error", "retryAfter": None},
    }
    captured = [record for _, record in world.store.spans(attempt) if record is not None]
    assert len(captured) == 4
    assert all(record.usable for record in captured)


async def test_a_node_agent_is_told_errors_as_the_vendor_tells_them(
    world: AnthropicWorld, repository_root: Path
) -> None:
    world.vendor.switches.refusals.append(429)
    world.vendor.switches.retry_after = "7"
    world.vendor.switches.error_after_events = 4
    world.backend.switches.cut_after_events = 4
    seen = await play(repository_root, world, world.key(), failing=True)
    assert seen["refused"] == {
        "name": "RateLimitError",
        "status": 429,
        "type": "rate_limit_error",
        "retryAfter": "7",
    }
    assert seen["broken"]["type"] == "overloaded_error"
    assert seen["brokenEngine"]["type"] == "api_error"
