"""Prompts reach agents by a variable of their environment, which has to hold them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from fulmen.agent import PROMPTS_VARIABLE
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_service_pb2
from fulmen.store.v1.resource_pb2 import ResourceVersion
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.library import MAX_PROMPTS_BYTES, StoreLibrary
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.errors import AgentFailed
from tests.support.runner.assignments import assignment

NAME = "resources/prompt.mine/versions/1"


class Store:
    """A store that holds one prompt."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.asked = 0

    async def GetResources(
        self, request: resource_service_pb2.GetResourcesRequest, *, timeout: float
    ) -> resource_service_pb2.GetResourcesResponse:
        """Returns it."""
        self.asked += 1
        found = ResourceVersion(name=request.names[0], content=self._content)
        return resource_service_pb2.GetResourcesResponse(resources=[found])


def given(*uses: str) -> Assignment:
    """Returns an attempt whose rollout names the prompt under these names, and an input that is none."""
    return replace(
        assignment(), resource_versions={**dict.fromkeys(uses, NAME), "data": "resources/dataset.x/versions/1"}
    )


async def library(store: Store) -> StoreLibrary:
    """Returns a library over it."""
    made = StoreLibrary(open_channel("127.0.0.1:1", timeout_s=1))
    made._stub = store  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("letter", ["x", "é", "漢", "\n"])
async def test_a_prompt_of_any_script_that_is_taken_fits_the_environment_of_a_program(letter: str) -> None:
    text = letter * (60_000 // len(letter.encode()))
    prompts = await (await library(Store(text.encode()))).prompts(given("prompt"))
    assert prompts == {"prompt": text}
    endpoints = Endpoints(llm_proxy_url="", otlp_url="")
    environment = endpoints.attempt_environment(replace(given("prompt"), prompts=prompts))
    assert PROMPTS_VARIABLE in environment
    status = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-S", "-c", ""], environment)
    assert status == 0


@pytest.mark.parametrize(
    ("letter", "count", "uses"),
    [(b"x", MAX_PROMPTS_BYTES + 1, ("prompt",)), (b"\n", 70_000, ("prompt",)), (b"x", 70_000, ("one", "two"))],
)
async def test_prompts_that_no_variable_can_hold_are_refused(letter: bytes, count: int, uses: tuple[str, ...]) -> None:
    with pytest.raises(AgentFailed, match="exceed 130048 bytes"):
        await (await library(Store(letter * count))).prompts(given(*uses))


async def test_a_prompt_that_is_too_large_is_not_kept() -> None:
    store = Store(b"x" * (MAX_PROMPTS_BYTES + 1))
    books = await library(store)
    for _ in range(2):
        with pytest.raises(AgentFailed):
            await books.prompts(given("prompt"))
    assert store.asked == 2


async def test_a_version_is_fetched_once() -> None:
    store = Store(b"Answer.")
    books = await library(store)
    for _ in range(2):
        assert await books.prompts(given("prompt", "other")) == {"prompt": "Answer.", "other": "Answer."}
    assert store.asked == 1
