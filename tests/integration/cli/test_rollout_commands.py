"""`fulmen rollout` against a real store."""

from __future__ import annotations

import json

import pytest

from fulmen.store.v1 import failure_pb2
from fulmen_cli.exits import Exit
from tests.support.cli import commands
from tests.support.cli.screens import check_screen
from tests.support.store.running import Runner, StoreHandle, Stubs, create


async def test_dead_rollouts_are_listed_shown_and_run_again_once(store: StoreHandle, stubs: Stubs) -> None:
    names = await create(stubs, 2, task_type="long", input=b'{"q": 1}', policy={"max_attempts": 2})
    runner = await Runner(stubs).open()
    await runner.complete(
        await runner.take(2),
        failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR,
        failure_message="it broke\nhere",
        rewards=[{"value": 0.5}],
    )
    await create(stubs)
    listed = await fulmen(store, "dead", "--filter", "task_type = long")
    shown = await fulmen(store, "show", names[0])
    assert all(name in listed for name in names)
    check_screen("rollout-dead", listed + shown, durations=True)
    again = json.loads(await fulmen(store, "retry", "--filter", "failure_kind = AGENT_ERROR", "--output", "json"))
    assert sorted(one["metadata"]["fulmen.retry_of"] for one in again) == sorted(names)
    assert "Nothing to retry." in await fulmen(store, "retry", "--filter", "*")
    assert names[0] in await fulmen(store, "retry", names[0])


async def test_lists_go_on_past_a_page_and_take_a_filter(store: StoreHandle, stubs: Stubs) -> None:
    for _ in range(2):
        await create(stubs, 600, priority=3)
    await create(stubs, 5)
    found = json.loads(await fulmen(store, "list", "--filter", "priority = 3", "--limit", "1100", "--output", "json"))
    assert len(found) == 1100
    cancelled = await fulmen(store, "cancel", *(one["name"] for one in found))
    assert "1100 cancelled, 0 asked to stop." in cancelled
    assert len(json.loads(await fulmen(store, "list", "--state", "queued", "--limit", "500", "-o", "json"))) == 105


async def test_a_malformed_filter_is_wrong_usage_and_says_where(store: StoreHandle) -> None:
    said = await fulmen(store, "list", "--filter", "state = WRONG AND colour = 1", status=Exit.USAGE)
    assert "at character 9" in said
    assert "at character 19" in said


@pytest.mark.parametrize("arguments", [[], ["x", "--filter", "*"], ["x", "--run", "r"]])
async def test_a_retry_is_by_name_or_by_filter(store: StoreHandle, arguments: list[str]) -> None:
    await fulmen(store, "retry", *arguments, status=Exit.USAGE)


async def fulmen(store: StoreHandle, *arguments: str, status: int = 0) -> str:
    """Runs `fulmen rollout` and returns what it wrote: its result, or if it is to fail what it says of that."""
    done = await commands.fulmen("rollout", *arguments, "--store-target", store.target, "--token", store.token())
    assert done.status == status, done
    return done.stderr if status else done.stdout
