"""LangChain and LangGraph against the proxy, unmodified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import checks
from tests.support.soak import long_but

DIALECTS = {"openai": "stop", "openai-responses": "stop", "anthropic": "tool_calls"}
"""With how the model ends a structured answer: for Anthropic's models it is the call of a tool."""


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_agent_ends_well_and_every_call_is_captured(tmp_path: Path, dialect: str) -> None:
    await checks.ends_well_and_is_captured(tmp_path, "langchain", dialect, structured=DIALECTS[dialect])


@pytest.mark.parametrize("dialect", long_but(["anthropic"], DIALECTS))
async def test_its_client_sends_refused_calls_again(tmp_path: Path, dialect: str) -> None:
    await checks.tries_again(tmp_path, "langchain", dialect)


@pytest.mark.parametrize("dialect", long_but(["openai-responses"], DIALECTS))
async def test_an_agent_of_an_attempt_that_is_over_gives_up(tmp_path: Path, dialect: str) -> None:
    await checks.gives_up_when_the_attempt_is_over(tmp_path, "langchain", dialect)


@pytest.mark.parametrize("dialect", long_but(["openai"], DIALECTS))
async def test_a_stream_that_breaks_off_is_no_answer(tmp_path: Path, dialect: str) -> None:
    await checks.raises_on_a_broken_stream(tmp_path, "langchain", dialect)
