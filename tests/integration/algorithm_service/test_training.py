"""Training for real: a tiny model, the real store, proxy, runner and engine, and processes that are killed."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.client import Client, connect
from fulmen.errors import Unavailable
from fulmen.local.stack import LocalStack
from tests.support.stack import running_stack, stack_targets
from tests.support.training import (
    BUILD,
    POLICY,
    check_books,
    finished_groups,
    publish_training_inputs,
    read_consumed,
)

pytestmark = [pytest.mark.serial, pytest.mark.xdist_group("serial"), pytest.mark.timeout(420)]

STEPS = 6
SETTINGS = {
    "steps": STEPS,
    "prompts_per_step": 2,
    "group_size": 4,
    "minibatches": 1,
    "max_staleness": 1,
    "max_tokens": 4,
    "mask_truncated": False,
    "checkpoint_every": 2,
    "validate_every": 3,
}
FINAL = (pb.TRAINING_RUN_STATE_SUCCEEDED, pb.TRAINING_RUN_STATE_FAILED, pb.TRAINING_RUN_STATE_CANCELLED)
WAIT_S = 240


class Watcher:
    """Follows a run over restarts of its service."""

    def __init__(self, stack: LocalStack, client: Client, name: str) -> None:
        self._stack = stack
        self._client = client
        self._name = name
        self.events: list[pb.TrainingRunEvent] = []

    async def follow(self) -> AsyncIterator[pb.TrainingRunEvent]:
        """Yields events until the final state."""
        while True:
            request = service_pb.WatchTrainingRunRequest(name=self._name, after_sequence=len(self.events))
            try:
                async for answer in self._client.training_runs.WatchTrainingRun(request, wait_for_ready=True):
                    assert answer.event.sequence == len(self.events) + 1
                    self.events.append(answer.event)
                    yield answer.event
                    if answer.event.run.state in FINAL:
                        return
            except Unavailable:
                continue

    async def until_step(self, step: int) -> None:
        """Waits until a step is announced."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.follow():
                if event.HasField("step") and event.step.step >= step:
                    return
        raise AssertionError(f"the run ended before step {step}: {self.story()}")

    async def until_notice(self, text: str) -> None:
        """Waits until a notice holds a text."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.follow():
                if text in event.notice.message:
                    return
        raise AssertionError(f"no notice said {text!r}: {self.story()}")

    async def end(self) -> pb.TrainingRun:
        """Waits for the final state."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.follow():
                if event.run.state in FINAL:
                    return event.run
        raise AssertionError("the events ended without a final state")

    def story(self) -> str:
        """Tells what happened, for a failed test."""
        return "\n".join([*self.notices(), self._stack.log_tail("algorithm")])

    def notices(self) -> list[str]:
        """Returns the notices so far."""
        return [e.notice.message for e in self.events if e.HasField("notice")]


async def start_run(stack: LocalStack, client: Client, root: Path, name: str) -> Watcher:
    """Creates the small GRPO run of these tests."""
    inputs = await publish_training_inputs(client, root)
    run = pb.TrainingRun(
        name=f"trainingRuns/{name}",
        algorithm="grpo",
        settings_json=json.dumps(SETTINGS),
        policy=pb.PolicySpec(name=POLICY, build=BUILD),
        inputs={use: inputs[use] for use in ("agent", "train_tasks", "validation_tasks", "bundle")},
    )
    await client.training_runs.CreateTrainingRun(service_pb.CreateTrainingRunRequest(training_run=run))
    return Watcher(stack, client, run.name)


def engine_pid(stack: LocalStack) -> int:
    """Finds the engine, the algorithm service's child."""
    parent = stack.process("algorithm").pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if "fulmen_algorithm.engine" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise AssertionError("the engine does not run")


async def test_a_run_whose_service_and_engine_are_killed_uses_every_group_once(
    short_tmp_path: Path, repository_root: Path
) -> None:
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "killed")
        await watcher.until_step(1)
        os.kill(engine_pid(stack), signal.SIGKILL)
        await watcher.until_step(3)
        await stack.kill_service("algorithm")
        await stack.start_service("algorithm")
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        assert run.step == STEPS
        assert any(text.startswith("Goes on from the checkpoint") for text in watcher.notices())
        assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(run.results)
        feed = await finished_groups(client, run.name)
        lines = read_consumed(short_tmp_path / "algorithm/runs/killed")
        check_books(lines, feed, steps=STEPS)
        assert (Path(run.model_path) / "model.safetensors").exists()
        report = await client.training_runs.GetTrainingRunReport(service_pb.GetTrainingRunReportRequest(name=run.name))
        assert "Where the time went" in report.markdown
        assert report.curve_png.startswith(b"\x89PNG")
        checkpoints = await client.training_runs.ListCheckpoints(service_pb.ListCheckpointsRequest(parent=run.name))
        assert checkpoints.checkpoints[0].step == STEPS


async def test_a_run_waits_for_store_and_proxy_and_goes_on(short_tmp_path: Path, repository_root: Path) -> None:
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "outages")
        await watcher.until_step(1)
        await stack.kill_service("store")
        await watcher.until_notice("The store does not answer")
        await stack.start_service("store")
        await watcher.until_notice("The store answers again")
        await stack.kill_service("llm_proxy")
        await stack.start_service("llm_proxy")
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        check_books(
            read_consumed(short_tmp_path / "algorithm/runs/outages"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
