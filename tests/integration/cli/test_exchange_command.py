"""`fulmen exchange status` against real algorithm services, and ranks that exchange over them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from structlog.testing import capture_logs

from fulmen.ids import ALL_PROJECTS
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_cli.exits import INTERRUPTED, Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.exchange_world import RUN, exchange, keep_run, ranks, serving, token
from tests.support.cli.screens import check_screen

LIMIT_S = 60
NOBODY = "127.0.0.1:1"
TORCH: dict[str, Any] = {
    "exchange": {"codec": "dgc", "ratio": 100.0, "link": {"kind": "torch"}, "policy": {"kind": "fixed"}},
    "parallel": {"kind": "ddp", "ranks": 2},
}


def linked(*targets: str) -> dict[str, Any]:
    """Returns the settings of a run whose shards are at these addresses."""
    return {"exchange": {"codec": "topk", "ratio": 4.0, "link": {"kind": "grpc", "targets": targets}}}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Services log in this process: what they write must not get into a command's output."""
    with capture_logs():
        yield


def environment(target: str, role: Role = Role.READER, project: str = "projects/default") -> dict[str, str]:
    return {"FULMEN_ALGORITHM_TARGET": target, "FULMEN_TOKEN": token(role, project), "COLUMNS": "200"}


async def status(*arguments: str, target: str, **who: Any) -> Result:
    words = ["exchange", "status", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, app, words, env=environment(target, **who))


async def shown(*arguments: str, target: str) -> str:
    result = await status(*arguments, target=target)
    assert result.exit_code == 0, result.output
    return result.stdout


async def as_json(*arguments: str, target: str) -> Any:
    return json.loads(await shown(*arguments, "-o", "json", target=target))


def row(text: str, first: str) -> list[str]:
    """Returns the words of the line that begins with one."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


def tell_of_an_exchange(runs: RunRegistry) -> None:
    events = runs.entry(RUN).events
    for step, ratio in ((3, 4.0), (4, 97.25)):
        runs.entry(RUN).update(step=step)
        values = {"loss": 1.0, "exchange_ratio": ratio, "exchange_sent_bytes": 1_234_567.0}
        values |= {"spent_exchange_seconds": 3.0, "spent_train_seconds": 9.0}
        events.step_done(StepMetrics(step=step, values=values | ({"exchange_cosine": 0.5} if step == 3 else {})))
    events.notify("info", "Resuming from the checkpoint of step 3.")
    events.notify("info", "exchange: compression off from round 4 on: gradients explode")


async def test_a_run_in_one_cluster_is_shown_by_what_its_stream_says(tmp_path: Path) -> None:
    keep_run(tmp_path, TORCH, tell=tell_of_an_exchange)
    keep_run(tmp_path, {}, name="projects/default/trainingRuns/newer")
    async with serving(tmp_path) as target:
        text = await shown(target=target)
        told = await as_json(target=target)

    check_screen("exchange-status", text)
    assert told["metrics"]["exchange_ratio"] == {"step": 4, "value": 97.25}
    assert [event["message"] for event in told["events"]] == ["compression off from round 4 on: gradients explode"]
    assert told["services"] == [{"service": target, "shards": [], "rounds": []}]


async def test_members_rounds_and_bytes_are_those_of_all_shards_wherever_they_are(tmp_path: Path) -> None:
    keep_run(tmp_path / "b", {})
    async with serving(tmp_path / "b") as second:
        # The run's settings are read when its service starts, which then has a port of its own.
        keep_run(tmp_path / "a", linked(second))
        async with serving(tmp_path / "a") as first, ranks([first, second]) as members:
            for number in (1, 2, 3):
                await exchange(members, number)
            text = await shown("small", "--target", first, "--target", second, target=first)
            told = await as_json("small", "--target", first, "--target", second, target=first)
            by_settings = await shown("small", target=first)
            got = sum(member.link.received_bytes for member in members)

    for number, target in enumerate((first, second)):
        words = row(text, f"{number} of 2")
        assert words[:8] == [str(number), "of", "2", target, "2", "3", "2", "of"]
    assert [row(text, f"{rank}   ")[:4] for rank in (0, 1)] == [[str(rank), "3", "1", "0"] for rank in (0, 1)]
    assert "round 2 (of 2 shards): ranks 0, 1;" in text
    shards = [shard for service in told["services"] for shard in service["shards"]]
    assert sum(int(shard["sent_bytes"]) for shard in shards) == got
    assert [each["round"] for service in told["services"] for each in service["rounds"]] == [2, 2]
    assert row(by_settings, "1 of 2")[3] == second
    assert "Not shown: shards 0 of 2" in by_settings


async def test_a_service_that_does_not_know_the_run_shows_its_shards_to_who_may_see_the_project(tmp_path: Path) -> None:
    async with serving(tmp_path / "b") as holder:
        keep_run(tmp_path / "a", linked(holder))
        async with serving(tmp_path / "a") as target, ranks([holder]) as members:
            await exchange(members, 1)
            own, all_projects = [
                await status("small", target=target, project=project) for project in ("projects/default", ALL_PROJECTS)
            ]
            foreign = await status("small", target=holder, project="projects/other")

    for seen in (own, all_projects):
        assert row(seen.stdout, "0 of 1")[3:8] == [holder, "2", "1", "2", "of"]
    assert foreign.exit_code == Exit.NOT_FOUND


async def test_a_straggler_and_who_has_not_come_are_seen(tmp_path: Path) -> None:
    keep_run(tmp_path, {})
    patience = {"quorum": 0.5, "min_wait_s": 0.01, "max_wait_s": 0.01}
    async with serving(tmp_path) as target, ranks([target], **patience) as members:
        await exchange(members, 1)
        await exchange(members[:1], 2)
        await exchange(members[:1], 3)
        text = await shown("small", target=target)
        await asyncio.to_thread(members[1].link.close)
        alone = await shown("small", target=target)

    assert "none among the run's settings" in text
    assert row(text, "0   ")[:3] == ["0", "3", "1"]
    assert row(text, "1   ")[:3] == ["1", "1", "1"]
    # Of the first round either may have been late, on a machine that is busy.
    assert int(row(text, "1   ")[3]) >= 2
    assert "round 2: ranks 0;" in text
    assert "late: 1" in text
    assert row(alone, "0 of 1")[6:9] == ["1", "of", "2"]


async def test_what_cannot_be_shown_is_told_and_what_can_is_shown(tmp_path: Path) -> None:
    keep_run(tmp_path, linked(NOBODY), tell=tell_of_an_exchange)
    keep_run(tmp_path, {}, name="projects/default/trainingRuns/plain")
    async with serving(tmp_path) as target:
        away = await status(target=target)
        nothing_held = await shown("small", "--target", target, target=target)
        unknown = await status("none", target=target)
        plain = await status("plain", target=target)
        foreign = await status("small", target=target, project="projects/other")
        runner = await status("small", target=target, role=Role.RUNNER)

    assert away.exit_code == Exit.FAILED
    assert f"{NOBODY} does not answer" in away.stdout
    assert row(away.stdout, "ratio") == ["ratio", "97.25x", "4"]
    assert f"{target} holds no shard of it: No rank of the run has joined an exchange on this server." in nothing_held
    assert (unknown.exit_code, foreign.exit_code, plain.exit_code) == (Exit.NOT_FOUND,) * 3
    assert "The training run does not exist" in unknown.stderr
    assert "The training run does not exist" in foreign.stderr
    assert "exchanges no gradients by a codec" in plain.stderr
    assert runner.exit_code == Exit.FAILED
    assert "another role" in runner.stderr


async def test_without_a_run_that_exchanges_it_is_told_how_one_does(tmp_path: Path) -> None:
    keep_run(tmp_path, {})
    async with serving(tmp_path) as target:
        result = await status(target=target)

    assert result.exit_code == Exit.NOT_FOUND
    assert 'exchange = {codec = "qsgd"}' in result.stderr


async def test_it_is_told_anew_until_it_is_interrupted(tmp_path: Path) -> None:
    keep_run(tmp_path, {})
    words = ("exchange", "status", "small", "--watch", "--interval", "0.1", "-o", "json")
    async with serving(tmp_path) as target, ranks([target]) as members, asyncio.timeout(LIMIT_S):
        await exchange(members, 1)
        process = await start(*words, target=target, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline())["services"][0]["shards"][0]["round"] == "1"
        await exchange(members, 2)
        while json.loads(await process.stdout.readline())["services"][0]["shards"][0]["round"] != "2":
            pass
        process.send_signal(signal.SIGINT)
        assert await process.wait() == INTERRUPTED


async def test_on_a_terminal_it_is_drawn_anew(tmp_path: Path) -> None:
    keep_run(tmp_path, {})
    screen, terminal = pty.openpty()
    async with serving(tmp_path) as target, ranks([target]) as members, asyncio.timeout(LIMIT_S):
        await exchange(members, 1)
        process = await start(
            "exchange", "status", "small", "--watch", "--interval", "0.1", target=target, stdout=terminal
        )
        os.close(terminal)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(screen, "rb"))
        await reader.readuntil(b"round 1: ranks 0, 1;")
        await exchange(members, 2)
        await exchange(members, 3)
        await reader.readuntil(b"round 2: ranks 0, 1;")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == INTERRUPTED
        transport.close()


async def start(*arguments: str, target: str, stdout: int) -> asyncio.subprocess.Process:
    """Starts the command line as a process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen_cli", *arguments),
        env={**os.environ, **environment(target), "TERM": "xterm"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
    )
