"""Training for real: a tiny model, the real store, proxy, runner and engine, and processes that are killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.client import Client, connect
from fulmen.errors import Unavailable
from fulmen_cli.local.stack import LocalStack
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

STEPS = 5
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
RANKS = 2
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

    async def some(self, count: int) -> None:
        """Waits for so many more events, or the final state."""
        async with asyncio.timeout(WAIT_S):
            async for _ in self.follow():
                count -= 1
                if not count:
                    return

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

    async def until_state(self, state: pb.TrainingRunState) -> None:
        """Waits until the run is in a state."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.follow():
                if event.run.state == state:
                    return
        raise AssertionError(f"the run ended before its state was {state}: {self.story()}")

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


async def start_run(
    stack: LocalStack,
    client: Client,
    root: Path,
    name: str,
    *,
    policy: str = POLICY,
    settings: Mapping[str, object] = SETTINGS,
) -> Watcher:
    """Creates the small GRPO run of these tests."""
    inputs = await publish_training_inputs(client, root, policy=policy)
    run = pb.TrainingRun(
        name=f"trainingRuns/{name}",
        algorithm="grpo",
        settings_json=json.dumps(settings),
        policy=pb.PolicySpec(name=policy, build=BUILD),
        inputs={use: inputs[use] for use in ("agent", "train_tasks", "validation_tasks", "bundle")},
    )
    await client.training_runs.CreateTrainingRun(service_pb.CreateTrainingRunRequest(training_run=run))
    return Watcher(stack, client, run.name)


def group_of(stack: LocalStack) -> list[psutil.Process]:
    """Finds the processes of trainers: launchers and their ranks."""
    children = psutil.Process(stack.process("algorithm").pid).children(recursive=True)
    return [child for child in children if "fulmen_algorithm.trainers.rank" in child.cmdline()]


def check_ended(group: list[psutil.Process]) -> None:
    """Checks that every process of a group of ranks ends."""
    assert len(group) == 1 + RANKS
    _, left = psutil.wait_procs(group, timeout=WAIT_S)
    assert left == []


async def test_a_run_in_ranks_goes_on_after_store_proxy_and_its_own_service_were_away(
    short_tmp_path: Path, repository_root: Path
) -> None:
    settings = {**SETTINGS, "parallel": {"kind": "ddp", "ranks": RANKS}}
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "outages", settings=settings)
        await watcher.until_step(1)
        await stack.kill_service("store")
        await watcher.until_notice("The store does not answer")
        await stack.start_service("store")
        await watcher.until_notice("The store answers again")
        await stack.kill_service("llm_proxy")
        await stack.start_service("llm_proxy")
        await watcher.until_step(3)
        first = group_of(stack)
        await stack.kill_service("algorithm")
        await asyncio.to_thread(check_ended, first)
        await stack.start_service("algorithm")
        await watcher.until_notice("Resuming from the checkpoint of step")
        second = group_of(stack)
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        await asyncio.to_thread(check_ended, second)
        assert (Path(run.model_path) / "model.safetensors").exists()
        assert int(run.policy_version.rpartition("/")[2]) > STEPS
        check_books(
            read_consumed(short_tmp_path / "algorithm/runs/outages"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
