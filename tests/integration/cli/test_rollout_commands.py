"""`fulmen rollout` against a real store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import pytest
from click.testing import Result

from fulmen.store.v1 import failure_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen_cli.exits import Exit
from tests.support.cli.screens import check_screen
from tests.support.store.running import LIMIT_S, Runner, Stubs, create, report, running_store

LONG_MESSAGE = f"""exited with status 1
Traceback (most recent call last):
  File "agent.py", line 3, in solve
ValueError: {"no answer " * 20}"""
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
    assert all(name.rpartition("/")[2] in listed for name in names)
    check_screen("rollout-dead", listed + shown, durations=True)
    again = json.loads(await rollout("retry", "--filter", "failure_kind = AGENT_ERROR", "--output", "json"))
    assert sorted(one["metadata"]["fulmen.retry_of"] for one in again) == sorted(names)
    assert "Nothing to retry." in await rollout("retry", "--filter", "*")
    assert names[0].rpartition("/")[2] in await rollout("retry", names[0])


async def test_a_list_shows_figures_filters_and_orders_by_them_and_fits_80_columns(
    rollout: Rollout, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulmen_cli.output.WIDTH_WITHOUT_TERMINAL", 80)
    await create(stubs, 3, group_id="a", group_size=3)
    runner = await Runner(stubs).open()
    best, worse, broken = await runner.take(3)
    await runner.complete([best], rewards=[{"value": 1}])
    await runner.complete([worse], rewards=[{"value": -0.6667}])
    await runner.complete([broken], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR, failure_message=LONG_MESSAGE)
    usage = usage_pb.Usage(request_count=2, prompt_token_count=12_345, completion_token_count=678, cost_micros=1_234)
    delta = usage_pb.UsageDelta(project="projects/default", attempt=best.attempt, model="m", usage=usage)
    await stubs.usage.SyncUsage(usage_pb.SyncUsageRequest(instance_id="p", sequence=1, usage=[delta]))
    listed = await rollout("list", "--order-by", "reward desc")
    ids = [each.rollout.name.rpartition("/")[2] for each in (best, worse, broken)]
    assert [line[:36] for line in listed.splitlines()[1:4]] == ids
    shown = await rollout("show", best.rollout.name)
    assert max(map(len, listed.splitlines())) <= 80
    check_screen("rollout-list", f"{listed}{shown.partition('policy')[0]}", durations=True)
    assert ids[1] in await rollout("list", "--filter", "reward < 0 AND duration < 60s")
    assert "No rollouts." in await rollout("list", "--filter", "cost_micros > 1234")
    said = await rollout("list", "--filter", "reward > x", "--order-by", "size", status=Exit.USAGE)
    assert "`x` is not a finite number" in said
    assert "`size` is not one of" in said


async def test_rollouts_are_found_by_the_beginning_of_their_ids_and_latest(rollout: Rollout, stubs: Stubs) -> None:
    (first,) = await create(stubs)
    (second,) = await create(stubs)
    short = second.rpartition("/")[2]
    length = next(n for n in range(1, 37) if not first.rpartition("/")[2].startswith(short[:n]))
    for given in (short, short[:length], short[: length + 1].upper(), "latest"):
        assert json.loads(await rollout("show", given, "-o", "json"))["name"] == second
    said = await rollout("show", short[: length - 1], status=Exit.USAGE)
    assert said.index(short) < said.index(first.rpartition("/")[2])
    assert "1 cancelled" in await rollout("cancel", short[:length])
    assert "has no rollout" in await rollout("show", "f", status=Exit.NOT_FOUND)


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


async def test_rollouts_are_counted_changed_and_deleted(rollout: Rollout, stubs: Stubs) -> None:
    await create(stubs, 3, metadata={"team": "a"})
    (waits,) = await create(stubs)
    runner = await Runner(stubs).open()
    done, failed, _ = await runner.take(3)
    await runner.complete([done])
    await runner.complete([failed], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
    counted = await rollout("count", "--filter", "metadata.team = a")
    changed = await rollout("update", waits, "--priority", "7", "--deadline", "2199-03-14T10:15:00Z")
    assert "priority 7" in await rollout("update", waits, "--deadline", "never")
    deleted = await rollout("delete", "--filter", "state = SUCCEEDED")
    assert "1 deleted." in await rollout("delete", failed.rollout.name)
    assert "team=a" in await rollout("count", "--by", "state", "--by", "metadata")
    assert json.loads(await rollout("count", "-o", "json"))["count"] == "2"
    check_screen("rollout-selection", counted + changed + deleted)
    assert "has ended" in await rollout("delete", waits, status=Exit.CONFLICT)
    assert "deadline_time: has passed" in await rollout("update", waits, "--deadline", "1999-01-01", status=Exit.USAGE)
    for arguments in (
        ["update", waits],
        ["update", waits, "--deadline", "soon"],
        ["delete"],
        ["delete", "x", "--run", "r"],
    ):
        await rollout(*arguments, status=Exit.USAGE)


async def test_members_of_groups_that_have_not_ended_are_said_to_be_kept(rollout: Rollout, stubs: Stubs) -> None:
    await create(stubs, 2, group_id="g", group_size=2)
    runner = await Runner(stubs).open()
    first, _ = await runner.take(2)
    await runner.complete([first])
    assert "0 deleted, 1 kept: their group or training run has not ended." in await rollout("delete", "--filter", "*")


async def test_a_watch_shows_changes_over_a_restart_of_the_store(database_url: str) -> None:
    def command(*options: str) -> Awaitable[asyncio.subprocess.Process]:
        return asyncio.create_subprocess_exec(
            sys.executable, "-m", "fulmen_cli", "rollout", "watch", *options, "--store-target", f"127.0.0.1:{port}",
            "--token", token, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async with running_store(database_url, lease_ttl_s=60.0) as first:
        token, port = first.token(), first.port
        stubs = await first.stubs()
        (name,) = await create(stubs)
        as_json = await command("-o", "json")
        begun = json.loads(await _line(as_json))
        assert list(begun) == ["cursor"]
        runner = await Runner(stubs).open()
        (taken,) = await runner.take(1)
        running = json.loads(await _line(as_json))
        assert [each["state"] for each in running["rollouts"]] == ["ROLLOUT_STATE_RUNNING"]
        as_text = await command("--cursor", begun["cursor"])
        assert "running  attempt 1 running on test-host" in await _line(as_text)
    async with running_store(database_url, port=port, lease_ttl_s=60.0) as second:
        await report(await second.stubs(), [taken], rewards=[{"value": 0.25}])
        done = json.loads(await _line(as_json))
        assert [(each["name"], each["reward"]) for each in done["rollouts"]] == [(name, 0.25)]
        assert "succeeded  reward 0.250  attempt 1 succeeded on test-host" in await _line(as_text)
    for process in (as_json, as_text):
        process.terminate()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(3 * LIMIT_S):
        return (await process.stdout.readline()).decode()


async def test_two_sets_of_rollouts_are_compared_task_by_task(rollout: Rollout, stubs: Stubs) -> None:
    run = "projects/default/trainingRuns/a"
    runner = await Runner(stubs).open()
    for version, rewards in ((1, (0.0, 0.5, 1.0)), (2, (1.0, 1.0, 0.5))):
        for task, reward in enumerate(rewards):
            await create(stubs, training_run=run, group_id=f"validation/{version}/{task}", input=b'"task %d"' % task)
            await runner.complete(await runner.take(1), rewards=[{"value": reward}])
    sides = ("--run", "a", "--group-prefix", "validation/1/", "--with-group-prefix", "validation/2/")
    shown = await rollout("compare", *sides)
    assert [line.split()[1] for line in shown.splitlines()[1:4]] == ['2"', '1"', '0"']
    assert (
        "2 wins, 1 losses, 0 ties on 3 tasks; mean 0.500 -> 0.833, difference +0.333 (-0.500 to +1.000, 95 %)" in shown
    )
    told = json.loads(await rollout("compare", *sides, "--output", "json"))
    assert (told["win_count"], told["interval_method"]) == (
        "2",
        "paired bootstrap over tasks, percentile, 1000 resamples",
    )
    none = await rollout("compare", "--run", "b", "--group-prefix", "x", "--with-run", "a")
    assert "The two sides have no task in common with rewards on both." in none
