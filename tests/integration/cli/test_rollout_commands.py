"""`fulmen rollout` against a real store."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest
from click.testing import Result

from fulmen.store.v1 import failure_pb2
from fulmen_cli.exits import Exit
from tests.support.cli.screens import check_screen
from tests.support.store.running import Runner, Stubs, create

Rollout = Callable[..., Awaitable[str]]


@pytest.fixture
def rollout(fulmen: Callable[..., Awaitable[Result]]) -> Rollout:
    """Returns a function that runs `fulmen rollout` and returns its output, or if it is to fail its error."""

    async def run(*arguments: str, status: int = 0) -> str:
        done = await fulmen("rollout", *arguments, status=status)
        return done.stderr if status else done.stdout

    return run


async def test_dead_rollouts_are_listed_shown_and_run_again_once(rollout: Rollout, stubs: Stubs) -> None:
    names = await create(stubs, 2, task_type="long", input=b'{"q": 1}', policy={"max_attempts": 2})
    runner = await Runner(stubs).open()
    await runner.complete(
        await runner.take(2),
        failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR,
        failure_message="it broke\nhere",
        rewards=[{"value": 0.5}],
    )
    await create(stubs)
    listed = await rollout("dead", "--filter", "task_type = long")
    shown = await rollout("show", names[0])
    assert all(name in listed for name in names)
    check_screen("rollout-dead", listed + shown, durations=True)
    again = json.loads(await rollout("retry", "--filter", "failure_kind = AGENT_ERROR", "--output", "json"))
    assert sorted(one["metadata"]["fulmen.retry_of"] for one in again) == sorted(names)
    assert "Nothing to retry." in await rollout("retry", "--filter", "*")
    assert names[0] in await rollout("retry", names[0])


async def test_lists_go_on_past_a_page_and_take_a_filter(rollout: Rollout, stubs: Stubs) -> None:
    for _ in range(2):
        await create(stubs, 600, priority=3)
    await create(stubs, 5)
    found = json.loads(await rollout("list", "--filter", "priority = 3", "--limit", "1100", "--output", "json"))
    assert len(found) == 1100
    cancelled = await rollout("cancel", *(one["name"] for one in found))
    assert "1100 cancelled, 0 asked to stop." in cancelled
    assert len(json.loads(await rollout("list", "--state", "queued", "--limit", "500", "-o", "json"))) == 105


async def test_a_malformed_filter_is_wrong_usage_and_says_where(rollout: Rollout) -> None:
    said = await rollout("list", "--filter", "state = WRONG AND colour = 1", status=Exit.USAGE)
    assert "at character 9" in said
    assert "at character 19" in said


@pytest.mark.parametrize("arguments", [[], ["x", "--filter", "*"], ["x", "--run", "r"]])
async def test_a_retry_is_by_name_or_by_filter(rollout: Rollout, arguments: list[str]) -> None:
    await rollout("retry", *arguments, status=Exit.USAGE)
