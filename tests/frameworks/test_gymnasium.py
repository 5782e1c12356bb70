"""Gymnasium's environments score the same as tasks of an agent as when they are played directly."""

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

TEXT_ACTIONS = 20


def player(body: dict[str, Any]) -> str:
    """Says the action that the rule names, of those that the model was told of."""
    system, *rest = body["messages"]
    turn = sum(message["role"] == "assistant" for message in rest)
    _, _, listed = system["content"].partition("nothing else: ")
    numbers = [int(number) for number in re.findall(r"\d+", listed)]
    chosen = choice(rest[-1]["content"], turn, len(numbers) or TEXT_ACTIONS)
    return f"I choose {numbers[chosen]}" if numbers else str(chosen)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, the scripted model and a proxy."""
    async with a_stage(player) as stage:
        yield stage


async def test_fifty_episodes_of_each_kind_of_space_score_as_they_do_without_fulmen(stage: Stage) -> None:
    cases = await native("gymnasium", "gymnasium_native.py")

    tasks = [task for case in cases for task in case["tasks"]]
    done = await scored(stage, "gymnasium", cases[0]["agent"], tasks, files=("guesses.py",))

    assert done.failures == []
    expected = [score for case in cases for score in case["scores"]]
    assert done.scores == expected
    assert len(expected) == 200
    assert len(set(expected)) > 20
    assert stage.outside.knocks == []
