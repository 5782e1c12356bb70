"""An environment of verifiers scores the same as tasks of an agent as in verifiers' own evaluation."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.environments.episodes import native, scored
from tests.support.environments.scripted import choice
from tests.support.frameworks.traced import Stage, a_stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1300)]


def adder(body: dict[str, Any]) -> str:
    """Adds, rightly or one too much, in a short or a long sentence."""
    question = body["messages"][-1]["content"]
    one, other = map(int, re.findall(r"\d+", question))
    total = one + other + choice(question, 0, 2)
    return f"It is {total}." + "." * choice(question, 1, 9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, the scripted model and a proxy."""
    async with a_stage(adder) as stage:
        yield stage


async def test_fifty_tasks_score_as_in_verifiers_own_evaluation(stage: Stage) -> None:
    record = await native("verifiers", "verifiers_native.py", stage.backend.url)

    files = ("sums_taskset.py",)
    done = await scored(stage, "verifiers", record["agent"], record["tasks"], files=files, slots=4)

    assert done.failures == []
    assert len(record["scores"]) == 50
    assert [done.rewards(number) for number in range(50)] == [pytest.approx(each) for each in record["scores"]]
    assert {each["right"] for each in record["scores"]} == {0.0, 1.0}
    assert stage.outside.knocks == []
    # Malformed ones are refused at once, with every problem.
    missing, misspelt, none = record["refused"]
    assert "'no-such-taskset' not found" in missing
    assert "model: it has no name" in misspelt
    assert "harnes" in misspelt
    assert "count: must be at least 1, not 0" in none
