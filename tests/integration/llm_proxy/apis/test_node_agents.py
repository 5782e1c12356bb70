"""The unmodified vendors' packages of Node.js against the proxy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.support.llm_proxy.vendor_world import AZURE, CHAT_ONLY, CLAUDE, ENGINE, GPT, VendorWorld
from tests.support.llm_proxy.vendors.openai import EMBEDDING, Fault

LIMIT_S = 60
SAID = "You said: hello"


async def play(root: Path, script: str, package: str, *, failing: bool = False, **environment: str) -> dict[str, Any]:
    """Runs an agent of the folder `node` to its end; returns the results that it prints.

    Args:
        package: the package that it needs.
        failing: whether the agent is to report how calls fail.
    """
    node = shutil.which("node")
    assert node is not None, "Node.js is needed: install it (Debian: apt-get install nodejs npm)"
    assert (root / "node_modules" / package).is_dir(), "run `make test`, which installs the vendors' packages"
    agent = await asyncio.create_subprocess_exec(
        node,
        f"tests/integration/llm_proxy/node/{script}",
        *(["failing"] if failing else []),
        cwd=root,
        env={**os.environ, **environment, "CAPTURED_MODEL": ENGINE},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, errors = await agent.communicate()
    assert agent.returncode == 0, errors.decode()
    seen: dict[str, Any] = json.loads(out)
    return seen


async def of_openai(root: Path, world: VendorWorld, key: str, *, failing: bool = False) -> dict[str, Any]:
    names = {"VENDOR_MODEL": GPT, "CHAT_MODEL": CHAT_ONLY, "PROXY_URL": world.proxy.url, "PROXY_KEY": key}
    return await play(root, "openai_agent.mjs", "openai", failing=failing, **names)


async def of_anthropic(root: Path, world: VendorWorld, key: str, *, failing: bool = False) -> dict[str, Any]:
    names = {"VENDOR_MODEL": CLAUDE, "PROXY_URL": world.anthropic_url, "PROXY_KEY": key}
    return await play(root, "anthropic_agent.mjs", "@anthropic-ai/sdk", failing=failing, **names)


def error(name: str, status: int, **kind: str) -> dict[str, Any]:
    return {"name": name, "status": status, "retryAfter": None} | kind


async def assert_captured(world: VendorWorld, attempt: str, calls: int) -> None:
    await world.proxy.flush(attempt)
    captured = [record for _, record in world.store.spans(attempt) if record is not None]
    assert [record.usable for record in captured] == [True] * calls


async def test_an_openai_agent_uses_every_api(world: VendorWorld, repository_root: Path) -> None:
    attempt, key = world.proxy.attempt()
    seen = await of_openai(repository_root, world, key)
    calls = [["add", {"input": "hello"}], ["multiply", {"input": "hello"}]]
    answer = {"text": SAID, "last": "response.completed", "calls": calls}
    assert seen == {
        "chat": [SAID, SAID],
        "captured": [SAID, SAID],
        "toolCalls": calls,
        "responses": answer,
        "translated": answer,
        "completion": "You said: one",
        "embedding": EMBEDDING,
        "models": sorted([GPT, AZURE, CHAT_ONLY, CLAUDE, ENGINE]),
        "model": CHAT_ONLY,
        "azure": SAID,
        "unknownModel": error("NotFoundError", 404, code="route_not_found"),
        "badRequest": error("BadRequestError", 400, code="argument_invalid"),
    }
    await assert_captured(world, attempt, 2)


async def test_an_openai_agent_gets_errors_as_its_vendor_words_them(world: VendorWorld, repository_root: Path) -> None:
    world.openai.faults.append(Fault(status=429, code="rate_limit_exceeded", headers={"Retry-After": "7"}))
    world.openai.error_after = 2
    seen = await of_openai(repository_root, world, world.key(), failing=True)
    assert seen["refused"] == error("RateLimitError", 429, code="rate_limit_exceeded", retryAfter="7")
    assert seen["broken"]["name"] == "APIError"


async def test_an_anthropic_agent_talks_streams_and_calls_tools(world: VendorWorld, repository_root: Path) -> None:
    attempt, key = world.proxy.attempt()
    seen = await of_anthropic(repository_root, world, key)
    calls = [["calculate", "hello"], ["look_up", "hello"]]
    assert seen == {
        "vendor": {"whole": SAID, "streamed": SAID, "pieces": 4, "stop": "end_turn"},
        "captured": {"whole": SAID, "streamed": SAID, "pieces": len(SAID), "stop": "end_turn"},
        "vendorTools": {"calls": calls, "stop": "tool_use", "last": "You said: 4"},
        "capturedTools": {"calls": calls[:1], "stop": "tool_use", "last": "You said: 4"},
        "counted": True,
        "notCounted": error("NotImplementedError", 501, type="api_error"),
        "unknownModel": error("NotFoundError", 404, type="not_found_error"),
        "badRequest": error("BadRequestError", 400, type="invalid_request_error"),
    }
    await assert_captured(world, attempt, 4)


async def test_an_anthropic_agent_gets_errors_as_its_vendor_words_them(
    world: VendorWorld, repository_root: Path
) -> None:
    world.refuse(CLAUDE, 429, retry_after="7")
    world.anthropic.switches.error_after_events = 4
    world.backend.switches.cut_after_events = 4
    seen = await of_anthropic(repository_root, world, world.key(), failing=True)
    assert seen["refused"] == error("RateLimitError", 429, type="rate_limit_error", retryAfter="7")
    assert seen["broken"]["type"] == "overloaded_error"
    assert seen["brokenEngine"]["type"] == "api_error"
