"""AutoGen against the proxy, unmodified."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import checks


async def test_an_agent_ends_well_and_every_call_is_captured(tmp_path: Path) -> None:
    await checks.ends_well_and_is_captured(tmp_path, "autogen", structured="stop")


async def test_its_client_sends_refused_calls_again(tmp_path: Path) -> None:
    await checks.tries_again(tmp_path, "autogen")


async def test_a_refusal_that_the_proxy_gets_over_is_not_noticed(tmp_path: Path) -> None:
    await checks.is_spared_a_failure(tmp_path, "autogen")


async def test_an_agent_of_an_attempt_that_is_over_gives_up(tmp_path: Path) -> None:
    await checks.gives_up_when_the_attempt_is_over(tmp_path, "autogen")


async def test_a_stream_that_breaks_off_is_no_answer(tmp_path: Path) -> None:
    await checks.raises_on_a_broken_stream(tmp_path, "autogen")
