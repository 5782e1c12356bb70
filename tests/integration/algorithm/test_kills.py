"""Two real runs side by side: the service is killed at random points, and a run is rolled back."""

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.errors import CheckpointNotFound, TrainingRunStateInvalid
from fulmen.rpc.services import Services, connect
from fulmen_cli.local.stack import LocalStack
from tests.support import soak
from tests.support.algorithm.module_processes import ENGINE, processes_of
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.small_training import STEPS, Watcher, start_run
from tests.support.algorithm.training import check_books, finished_groups, read_consumed
from tests.support.cli.commands import fulmen
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.long,
    pytest.mark.serial,
    pytest.mark.timeout(900),
]

KILLS = 2 * soak.SOAK
SEED = soak.seed()
POLICIES = ("one", "two")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine's process, and the policy version that it was started with."""

    pid: int
    version: int


def engines() -> dict[str, Engine]:
    """Finds the engines by policy."""
    found = {}
    for process in processes_of(ENGINE):
        words = process.cmdline()
        version = int(words[words.index("--version") + 1])
        found[words[words.index("--served-model-name") + 1]] = Engine(pid=process.pid, version=version)
    return found


def is_forked(pid: int) -> bool:
    """Returns whether a process comes from the fork server."""
    parent = psutil.Process(pid).parent()
    return parent is not None and "fulmen_service_kit.fork_server" in parent.cmdline()


async def command(folder: Path, *words: str) -> str:
    """Runs `fulmen run ...`; returns what it printed."""
    done = await fulmen("run", *words, "--state-dir", folder)
    assert done.status == 0, done.stderr
    return done.stdout


async def restart(stack: LocalStack) -> None:
    """Kills the service with signal 9 and starts it again."""
    await stack.kill_service("algorithm")
    await stack.start_service("algorithm")


async def check(folder: Path, client: Services, watcher: Watcher, run: pb.TrainingRun) -> None:
    """Checks that a run has ended well and used every group once."""
    assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
    lines = read_consumed(folder / f"algorithm/runs/default/{run.name.rpartition('/')[2]}")
    check_books(lines, await finished_groups(client, run.name), steps=STEPS)


async def test_two_runs_whose_service_is_killed_at_random_points_use_every_group_once(short_tmp_path, repository_root):
    chance = random.Random(SEED)
    print(f"{soak.SEED_VARIABLE}={SEED}")
    async with (
        running_stack(
            short_tmp_path, environment={"FULMEN_ALGORITHM_KEEP_CHECKPOINTS": "9"}, forks_alone=True
        ) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watchers = [await start_run(stack, client, repository_root, name, policy=name) for name in POLICIES]
        await watchers[0].until_step(1)
        assert not is_forked(stack.process("algorithm").pid)
        os.kill(engines()[POLICIES[0]].pid, signal.SIGKILL)
        # Once in the middle of a run for certain; a run may have ended by the time of the others.
        await restart(stack)
        assert is_forked(stack.process("algorithm").pid)
        for _ in range(KILLS - 1):
            await chance.choice(watchers).some(chance.randrange(1, 4))
            await restart(stack)
        runs = [await watcher.end() for watcher in watchers]
        for watcher, run in zip(watchers, runs, strict=True):
            await check(short_tmp_path, client, watcher, run)
            assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(run.results)
            assert (Path(run.model_path) / "model.safetensors").exists()
        assert any(text.startswith("Resuming from the checkpoint") for text in watchers[0].notices())
        await _comes_back_without_a_run(stack, runs)
        await _rolled_back(short_tmp_path, client, watchers[0], runs[0])


async def _comes_back_without_a_run(stack: LocalStack, runs: list[pb.TrainingRun]) -> None:
    """Starts the service again when no run is left: what was served is served again."""
    await restart(stack)
    last = {run.policy.name: int(run.policy_version.rpartition("/")[2]) for run in runs}

    async def served() -> bool | None:
        return {policy: engine.version for policy, engine in engines().items()} == last or None

    await eventually(served, what="the policies are served again")
    assert all(is_forked(engine.pid) for engine in engines().values())


async def _rolled_back(folder: Path, client: Services, watcher: Watcher, ended: pb.TrainingRun) -> None:
    """Puts a run back to step 2 from the command line, pauses it on the way, and lets it end."""
    listed = await client.training_runs.ListCheckpoints(service_pb.ListCheckpointsRequest(parent=ended.name))
    target = next(each for each in listed.checkpoints if each.step == 2)
    assert target.name == f"{ended.name}/checkpoints/{target.sequence}"
    missing = service_pb.RollbackTrainingRunRequest(checkpoint=f"{ended.name}/checkpoints/999")
    with pytest.raises(CheckpointNotFound):
        await client.training_runs.RollbackTrainingRun(missing)
    shown = await command(folder, "checkpoints", ended.name)
    assert f"{ended.policy_version.rpartition('/')[0]}/" in shown
    told = await command(folder, "rollback", ended.name, str(target.sequence))
    assert told == f"{ended.name}: pending (resumes from step 2 once a run slot is free)\n"
    with pytest.raises(TrainingRunStateInvalid):
        await client.training_runs.RollbackTrainingRun(service_pb.RollbackTrainingRunRequest(checkpoint=target.name))
    await watcher.until_notice("Rolled back to checkpoint")
    # Not from the command line, whose start may take longer than the rest of the run.
    await client.training_runs.PauseTrainingRun(service_pb.PauseTrainingRunRequest(name=ended.name))
    await watcher.until_state(pb.TRAINING_RUN_STATE_PAUSED)
    assert await command(folder, "pause", ended.name) == f"{ended.name}: paused\n"
    assert await command(folder, "resume", ended.name) == f"{ended.name}: pending\n"
    again = await watcher.end()
    await check(folder, client, watcher, again)
    lines = read_consumed(folder / f"algorithm/runs/default/{ended.name.rpartition('/')[2]}")
    assert {line["branch"] for line in lines if line["step"] > 2} == {1}
    assert (again.rollback_count, again.step) == (1, STEPS)
    assert again.policy_version != ended.policy_version
    report = await client.training_runs.GetTrainingRunReport(service_pb.GetTrainingRunReportRequest(name=ended.name))
    assert "Where the time went" in report.markdown
    assert "Discarded by the rollback to step 2" in report.markdown
    assert report.curve_png.startswith(b"\x89PNG")
