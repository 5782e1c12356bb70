"""`fulmen rollout rescore`: stored rollouts under another grader, published as scores; stopped and gone on with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from fulmen.errors import ResourceNotFound
from fulmen.scores import Scores, read_scores
from fulmen.store.v1 import lease_service_pb2, resource_service_pb2
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.sdk.trajectory_cases import chunk_of, plain, records_of
from tests.support.store.running import Runner, StoreHandle, Stubs, create, results_of
from tests.support.store.spans import append

RUN = "projects/default/trainingRuns/stored"
GROUPS, MEMBERS = 5, 4
LIMIT_S = 60

GRADERS = """\
import json
import sys


def longest(task, outcome):
    return {"reward": float(len(outcome)), "digits": float(outcome.isdigit())}


def picky(task, outcome):
    print("picky looks")
    if outcome == "11":
        raise ValueError("eleven is no answer")
    return len(outcome)


def by_record(task, outcome, context):
    calls = context.stored.trajectory.rows[0].response_ids
    old = context.stored.attempt.rewards[0].value
    return 100 * len(calls) + old


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(given["task"]["number"] + len(given["outcome"]))
"""
SLOW = """\
import asyncio
import pathlib

async def grade(task, outcome):
    if task["number"] >= 10 and not pathlib.Path({gate!r}).exists():
        await asyncio.Event().wait()
    with open({log!r}, "a") as file:
        file.write(outcome + "\\n")
    return len(outcome)
"""


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Takes back what a runner's process puts into its environment, and how the command sets up logs."""
    before, logs = dict(os.environ), structlog.get_config()
    yield
    structlog.configure(**logs)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
async def rollouts(store: StoreHandle, stubs: Stubs) -> list[str]:
    """Stores 20 rollouts in 5 groups: rollout n answered n ones, and got n as its reward; one more failed."""
    runner = await Runner(stubs).open()
    proxy = await store.stubs(role=Role.SERVICE)
    names = []
    for group in range(GROUPS):
        for member in range(MEMBERS):
            number = group * MEMBERS + member
            fields = {"training_run": RUN, "group_id": f"train/{group}", "group_size": MEMBERS}
            names += await create(stubs, 1, input=json.dumps({"number": number}).encode(), mode=1, **fields)
    taken = await runner.take(len(names))
    for each in taken:
        await append(proxy, chunk_of(records_of([plain([1, 2], [3, 4])], []), attempt=each.attempt))
    order = {name: number for number, name in enumerate(names)}
    results = [
        result
        for each in taken
        for result in results_of(
            [each],
            rewards=[{"value": float(-order[_rollout(each.attempt)])}],
            output=b"1" * (order[_rollout(each.attempt)] + 1),
            output_content_type="text/plain; charset=utf-8",
        )
    ]
    await runner.stream.write(
        lease_service_pb2.StreamLeasesRequest(complete=lease_service_pb2.CompletedAttempts(results=results))
    )
    await runner.expect("ack")
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes the graders' folder."""
    made = tmp_path / "graders"
    made.mkdir()
    (made / "graders.py").write_text(GRADERS)
    return made


def words(store: StoreHandle, folder: Path, *arguments: str) -> list[str]:
    """Returns the words of a command."""
    where = ["--store-target", store.target, "--token", store.token(Role.CLIENT), "--folder", str(folder)]
    return ["rollout", "rescore", *arguments, *where, "--state-dir", str(folder.parent / ".fulmen")]


async def fulmen(store: StoreHandle, folder: Path, *arguments: str) -> Any:
    """Runs the command in this process."""
    command = words(store, folder, *arguments)
    return await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200", "TERM": "dumb"})


async def published(stubs: Stubs, name: str) -> Scores:
    """Reads the latest version of scores."""
    request = resource_service_pb2.GetResourcesRequest(names=[f"resources/{name}"])
    [version] = (await stubs.resources.GetResources(request)).resources
    assert version.kind == "scores"
    return read_scores(version.content)


async def test_a_python_grader_scores_every_rollout_and_the_summary_says_what_changed(
    store: StoreHandle, stubs: Stubs, rollouts: list[str], folder: Path
) -> None:
    arguments = ["--grader", "graders.py:longest", "--run", RUN, "--name", "scores.long"]
    result = await fulmen(store, folder, *arguments)

    assert (result.exit_code, result.exception) == (0, None), result.output
    scores = await published(stubs, "scores.long")
    assert [each.rollout for each in scores.rollouts] == sorted(rollouts)
    by_name = {each.rollout: each for each in scores.rollouts}
    for number, name in enumerate(rollouts):
        assert by_name[name].rewards == {("reward", None, b""): number + 1.0, ("digits", None, b""): 1.0}
        assert (by_name[name].group, by_name[name].training_run) == (f"train/{number // MEMBERS}", RUN)
        assert by_name[name].mode == "train"
    assert (scores.grader.kind, scores.grader.entry) == ("python", "graders.py:longest")
    assert scores.source.training_run == RUN
    assert "mean reward -9.5 -> 10.5" in result.stdout
    # Every group is turned around.
    assert "20 rollouts in 5 of 5 groups changed their order." in result.stdout
    assert not list((folder.parent / ".fulmen/rescoring").iterdir())

    again = await fulmen(store, folder, *arguments)
    assert "Published resources/scores.long/versions/1." in again.stdout, "equal scores are published once"


async def test_a_command_and_a_grader_with_the_record_score_what_a_filter_selects(
    store: StoreHandle, stubs: Stubs, rollouts: list[str], folder: Path
) -> None:
    command = f"{sys.executable} graders.py"
    where = ["--filter", 'group_id = "train/1"', "--name"]

    by_command = await fulmen(store, folder, "--grader-command", command, *where, "scores.command")
    by_record = await fulmen(store, folder, "--grader", "graders.py:by_record", *where, "scores.record")

    assert by_command.exit_code == by_record.exit_code == 0, by_command.output + by_record.output
    finals = {each.rollout: each.final for each in (await published(stubs, "scores.command")).rollouts}
    assert finals == {rollouts[number]: 2.0 * number + 1 for number in range(4, 8)}
    finals = {each.rollout: each.final for each in (await published(stubs, "scores.record")).rollouts}
    assert finals == {rollouts[number]: 200.0 - number for number in range(4, 8)}


async def test_a_grader_that_fails_is_told_with_its_rollout_and_nothing_is_published_unless_that_is_allowed(
    store: StoreHandle, stubs: Stubs, rollouts: list[str], folder: Path
) -> None:
    arguments = ["--grader", "graders.py:picky", "--run", RUN, "--name", "scores.picky"]

    refused = await fulmen(store, folder, *arguments)
    with pytest.raises(ResourceNotFound):
        await published(stubs, "scores.picky")
    allowed = await fulmen(store, folder, *arguments, "--max-failed", "1", "--output", "json")

    assert refused.exit_code == Exit.FAILED
    assert f"{rollouts[1]}: AGENT_ERROR: grader failed:" in refused.stderr
    assert "eleven is no answer" in refused.stderr
    assert "failed on 1 of 20 rollouts" in refused.stderr
    assert allowed.exit_code == 0, allowed.output
    scores = await published(stubs, "scores.picky")
    assert [each.rollout for each in scores.rollouts if each.problem is not None] == [rollouts[1]]
    assert scores.failed == 1
    # What the runner's parts log and the grader prints is no part of the document.
    summary = json.loads(allowed.stdout)
    assert "picky looks" in allowed.stderr
    assert (summary["scored"], summary["failures"]) == (19, {"AGENT_ERROR": 1})


async def test_a_dry_run_shows_both_rewards_and_keeps_nothing(
    store: StoreHandle, stubs: Stubs, rollouts: list[str], folder: Path
) -> None:
    result = await fulmen(store, folder, "--grader", "graders.py:longest", "--dry-run", "3")

    assert result.exit_code == 0, result.output
    for number in (17, 18, 19):
        assert f"{rollouts[number]}  train/4  -{number} -> {number + 1}" in result.stdout
    assert rollouts[16] not in result.stdout
    assert not (folder.parent / ".fulmen").exists()


async def test_usage_errors_name_what_to_do(store: StoreHandle, rollouts: list[str], folder: Path) -> None:
    for arguments, text in (
        (["--name", "x"], "Give one grader"),
        (["--grader", "graders.py:longest"], "Name the scores with --name"),
        (["--grader", "nowhere.py:grade", "--name", "x"], "nowhere.py"),
        (["--judge-model", "m", "--judge-min", "9", "--judge-max", "3", "--name", "x"], "must be greater than min"),
        (["--judge-min", "1", "--grader", "graders.py:longest", "--name", "x"], "need --judge-model"),
        (["--grader", "graders.py:missing", "--name", "x"], "no callable 'missing'"),
        (["--grader", "graders.py:longest", "--name", "x", "--run", "none"], "No rollout with an outcome"),
        (["--grader", "graders.py:longest", "--name", "x", "--filter", "nonsense ="], "filter"),
    ):
        result = await fulmen(store, folder, *arguments)
        assert isinstance(result.exception, SystemExit), (arguments, result.exception)
        assert result.exit_code != 0, arguments
        assert text in result.stderr, (arguments, result.stderr)


async def test_a_rescoring_that_was_killed_goes_on_and_scores_nothing_twice(
    store: StoreHandle, stubs: Stubs, rollouts: list[str], folder: Path, tmp_path: Path
) -> None:
    log, gate = tmp_path / "graded", tmp_path / "gate"
    log.touch()
    (folder / "slow.py").write_text(SLOW.format(gate=str(gate), log=str(log)))
    arguments = ["--grader", "slow.py:grade", "--name", "scores.slow", "--concurrency", "20"]
    code = "from fulmen_cli.main import app; app()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *words(store, folder, *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(LIMIT_S):
        while len(_lines(folder)) < 10:  # noqa: ASYNC110  # The file of another process.
            await asyncio.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    before = log.read_text().split()
    [partial] = (folder.parent / ".fulmen/rescoring").iterdir()
    with partial.open("ab") as file:
        file.write(b'3.0\t{"rollout":"projects/default/rollouts/')
    gate.touch()

    result = await fulmen(store, folder, *arguments)

    assert result.exit_code == 0, result.output
    assert sorted(before, key=len) == ["1" * length for length in range(1, 11)]
    assert sorted(log.read_text().split(), key=len) == ["1" * length for length in range(1, 21)]
    assert "mean reward -9.5 -> 10.5" in result.stdout
    assert len((await published(stubs, "scores.slow")).rollouts) == 20


def _lines(folder: Path) -> list[bytes]:
    return [
        line
        for path in (folder.parent / ".fulmen/rescoring").glob("*.jsonl")
        for line in path.read_bytes().splitlines()
    ]


def _rollout(attempt: str) -> str:
    return attempt.partition("/attempts/")[0]
