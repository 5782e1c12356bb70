"""The command lines of coding agents, unmodified, as the wrappers of examples/harnesses run them in a real runner: what the
model was asked and said is captured token by token, and trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.frameworks.coder import ANSWER, COUNT, QUESTION, delegate, repair
from tests.support.frameworks.harnesses import PROGRAMS, Workshop, a_workshop

pytestmark = pytest.mark.asyncio(loop_scope="module")

# How many calls each row of the attempt has: a harness only appends to what it sends. Claude Code, however, sends the call of Edit
# back with the argument `replace_all`, which the model had left out: what follows is another sequence.
ROWS = {"claude-code": [3, 1], "codex": [3], "mini-swe-agent": [3]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workshop() -> AsyncIterator[Workshop]:
    """Yields a store, the scripted model, a proxy and a runner."""
    async with a_workshop() as workshop:
        yield workshop
        # Nothing but model calls has left the harnesses.
        assert workshop.stage.outside.knocks == []


@pytest.mark.parametrize("harness", PROGRAMS)
async def test_a_repository_is_repaired_and_every_call_is_captured(workshop: Workshop, harness: str) -> None:
    worked = await workshop.work(harness, repair)

    assert worked.rewards == [1.0], worked.run.attempt.failure_message
    worked.check_captures()
    assert [row.call_count for row in worked.trajectory.rows] == ROWS[harness]
    assert workshop.stage.outside.knocks == []


@pytest.mark.parametrize("harness", ["claude-code", "codex"])
async def test_the_answer_of_the_model_is_what_the_harness_prints(workshop: Workshop, harness: str) -> None:
    worked = await workshop.work(harness, lambda _: ANSWER)

    assert ANSWER in worked.run.outcome
    assert worked.rewards == [0.0]
    worked.check_captures()


async def test_the_agents_that_codex_starts_are_captured_with_it(workshop: Workshop) -> None:
    worked = await workshop.work("codex", delegate)

    asked = [request["messages"] for request in worked.requests]
    assert any({"role": "user", "content": QUESTION} in messages for messages in asked)
    assert f'"completed":"{COUNT}"' in worked.run.outcome
    worked.check_captures()
