"""Schedules from the command line, against a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
from click.testing import Result

from fulmen_cli.exits import Exit
from tests.support.cli.screens import check_screen

Fulmen = Callable[..., Awaitable[Result]]
AGENT = "resources/agent.echo/versions/1"
LIMIT_S = 20.0


async def until_run(fulmen: Fulmen, name: str) -> None:
    """Waits until a schedule has created rollouts."""
    async with asyncio.timeout(LIMIT_S):
        shown = ""
        while '"SCHEDULE_RUN_STATE_CREATED"' not in shown:
            await asyncio.sleep(0.05)
            shown = (await fulmen("schedule", "show", name, "-o", "json")).stdout


async def test_a_schedule_is_created_shown_paused_resumed_and_deleted(
    fulmen: Fulmen, tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n{"input": 2}\n')
    yearly = ("--cron", "0 3 31 12 *")
    screens = [
        await fulmen("schedule", "list"),
        await fulmen(
            "schedule", "create", "nightly", AGENT, *yearly, "--time-zone", "Europe/Berlin", "--tasks",
            tmp_path / "tasks.jsonl", "--skip-overlapping",
        ),
        await fulmen("schedule", "create", "other", AGENT, *yearly, "--task", "{}", "--skip-missed"),
    ]  # fmt: skip
    connection = await asyncpg.connect(database_url)
    await connection.execute("update schedule set next_due = now() where name = 'nightly'")
    await connection.close()
    await until_run(fulmen, "nightly")
    screens += [
        await fulmen("schedule", "list"),
        await fulmen("schedule", "show", "nightly"),
        await fulmen("schedule", "pause", "nightly", "--reason", "holidays"),
        await fulmen("schedule", "show", "projects/default/schedules/nightly"),
        await fulmen("schedule", "list"),
        await fulmen("schedule", "resume", "nightly"),
        await fulmen("schedule", "delete", "nightly"),
        await fulmen("schedule", "delete", "nightly", status=Exit.NOT_FOUND),
    ]
    check_screen("schedule", "".join(each.stdout for each in screens))
    listed = json.loads((await fulmen("schedule", "list", "-o", "json")).stdout)
    assert [each["name"] for each in listed] == ["projects/default/schedules/other"]
    rollouts = json.loads((await fulmen("rollout", "list", "-o", "json")).stdout)
    assert [each["metadata"]["fulmen.schedule"] for each in rollouts] == ["nightly", "nightly"]


async def test_every_problem_of_a_schedule_is_printed(fulmen: Fulmen) -> None:
    words = ("schedule", "create", "Nightly", AGENT, "--cron", "61 * * *", "--time-zone", "Mars", "--task", "{}")
    error = await fulmen(*words, status=Exit.USAGE)
    assert all(path in error.output for path in ("schedule.name", "schedule.cron", "schedule.time_zone"))
