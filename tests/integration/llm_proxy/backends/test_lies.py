"""Whatever a backend says of its tokens, the call is recorded and marked as unusable, and the proxy goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.llm_proxy.rogue_backend import CHAT, DONE, WHOLE, answers, event, response, streams
from tests.support.llm_proxy.rogue_world import TINY, RogueWorld, request_of, rogue_fixtures

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 10**30
RANGE = {"version": 1, "start": 0, "end": 2}
OF_A_CHOICE: dict[str, dict[str, Any]] = {
    "a version beyond all numbers": {"weight_versions": [RANGE | {"version": HUGE}]},
    "a version below all numbers": {"weight_versions": [RANGE | {"version": -HUGE}]},
    "a range beyond all numbers": {"weight_versions": [RANGE | {"end": HUGE}]},
    "a range that begins before all": {"weight_versions": [RANGE | {"start": -HUGE}]},
    "a token beyond all ids": {"token_ids": [72, HUGE]},
    "a log-probability beyond all numbers": {"logprobs": {"content": [{"logprob": -1e300}, {"logprob": -0.5}]}},
    "a reason that is no text": {"finish_reason": "\ud800"},
    "a reason without end": {"finish_reason": "x" * 100_000},
    "an index beyond all numbers": {"index": HUGE},
    "an index below all": {"index": -1},
}
OF_THE_ANSWER: dict[str, dict[str, Any]] = {
    "usage beyond all numbers": {"usage": {"prompt_tokens": HUGE, "completion_tokens": HUGE}},
    "usage below zero": {"usage": {"prompt_tokens": -1, "completion_tokens": -2}},
    "a version of the answer beyond all numbers": {"metadata": {"weight_version": HUGE}},
    "versions of the answer beyond all numbers": {"weight_versions": [RANGE | {"version": HUGE}]},
    "an id that is no text": {"id": "\ud800"},
    "a model that is no text": {"model": "\ud800"},
    "an id that is a number": {"id": HUGE},
}


shared, world = rogue_fixtures(retry_deadline_s=0)


def told(lie: str) -> dict[str, Any]:
    """Returns a good answer but for a lie."""
    if lie in OF_THE_ANSWER:
        return WHOLE[CHAT] | OF_THE_ANSWER[lie]
    [choice] = WHOLE[CHAT]["choices"]
    return WHOLE[CHAT] | {"choices": [choice | OF_A_CHOICE[lie]]}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("lie", [*OF_A_CHOICE, *OF_THE_ANSWER])
async def test_a_call_with_a_lie_is_recorded_and_never_trained_on(world: RogueWorld, lie: str, streamed: bool) -> None:
    answer = told(lie)
    if streamed:
        choices = [
            {name: value for name, value in choice.items() if name != "message"} | {"delta": choice["message"]}
            for choice in answer["choices"]
        ]
        world.backend.act = streams(
            event(answer | {"object": "chat.completion.chunk", "choices": choices}), event(DONE)
        )
    else:
        world.backend.act = answers(response(json.dumps(answer).encode()), goes_on=True)
    attempt, key = world.proxy.attempt()
    status = (await world.post(CHAT, request_of(CHAT, TINY) | {"stream": streamed}, key)).status
    assert status in (200, 502)
    summary = await world.proxy.flush(attempt, timeout=5)
    assert summary.flushed
    # A version that is no number of ours is whatever its trainer calls its weights.
    harmless = lie.startswith(("an id", "a model", "an index", "a reason without", "a version of the answer"))
    assert (summary.call_count, summary.unusable_count) == (1, 1) or harmless
