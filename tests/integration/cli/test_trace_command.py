"""`fulmen trace` against a real store: contents of model calls, and spans as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import Result

from fulmen.store.v1 import failure_pb2
from fulmen.type.v1 import model_call_pb2
from fulmen_cli.exits import Exit
from fulmen_store.spans import following
from tests.support.cli.screens import check_screen
from tests.support.store.running import Runner, Stubs, create
from tests.support.store.spans import append, packed, span

Fulmen = Callable[..., Awaitable[Result]]
QUESTION = {"role": "user", "content": "What is 2+3?\nThink."}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "5"}
ANSWER = {"role": "assistant", "content": "It is 5.\x1b[2J"}


def call(attempt: str, name: str, start: int, messages: list[Any], answer: Any) -> Any:
    """Makes a chunk of one captured call."""
    record = model_call_pb2.ModelCallRecord(
        model="tiny",
        policy="tiny",
        prompt_token_ids=bytes(4 * 12),
        completion_token_ids=bytes(4 * 3),
        completion_logprobs=bytes(4 * 3),
        policy_versions=[model_call_pb2.PolicyVersionRange(version=7, start=0, end=3)],
        finish_reason="stop",
        usable=True,
        request_json=json.dumps({"messages": messages}).encode(),
        response_json=json.dumps({"choices": [{"index": 0, "message": answer}]}).encode(),
    )
    return packed(attempt, span(name, start=start), model_call=record.SerializeToString())


def calls(attempt: str) -> list[Any]:
    """Makes the calls of one attempt."""
    return [
        call(attempt, "chat tiny", 1, [QUESTION], CALLS),
        call(attempt, "chat tiny", 2, [QUESTION, CALLS, RESULT], ANSWER),
    ]


async def test_a_trace_shows_what_each_model_call_adds_to_the_conversation(fulmen: Fulmen, stubs: Stubs) -> None:
    (name,) = await create(stubs)
    await append(stubs, packed(f"{name}/attempts/1", span("solve", start=0.5, seconds=2)), *calls(f"{name}/attempts/1"))
    check_screen("trace", (await fulmen("trace", "latest")).stdout)
    told = json.loads((await fulmen("trace", name, "--output", "json")).stdout)
    assert [each["span"]["name"] for each in told] == ["solve", "chat tiny", "chat tiny"]


async def test_a_trace_is_followed_until_the_rollout_has_ended(
    fulmen: Fulmen, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LINGER_S", 0.1)
    await create(stubs)
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    first, second = calls(assignment.attempt)
    await append(stubs, first)
    followed = asyncio.create_task(fulmen("trace", "latest", "--follow"))
    await append(stubs, second)
    await runner.complete(
        [assignment], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR, failure_message="ValueError: no\nmore"
    )
    check_screen("trace-follow", (await followed).stdout, durations=True)
    as_json = await fulmen("trace", "latest", "-f", "--output", "json")
    lines = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [line["model_call"]["model"] for line in lines] == ["tiny", "tiny"]


async def test_a_rollout_that_does_not_exist_is_not_followed(fulmen: Fulmen) -> None:
    await fulmen("trace", "0192f0c1-7a6e-7c53-9f3e-0123456789ab", "--follow", status=Exit.NOT_FOUND)
