"""A small training run of a running service, and a watcher of its events."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.errors import Unavailable
from fulmen.rpc.services import Services
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.runs import FINAL_RUN_STATES
from tests.support.algorithm.training import POLICY, create_run, publish_training_inputs

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
WAIT_S = 240


class Watcher:
    """Follows a run over restarts of its service."""

    def __init__(self, stack: LocalStack, client: Services, name: str, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._stack = stack
        self._client = client
        self.name = name
        self.events: list[pb.TrainingRunEvent] = []

    async def follow(self) -> AsyncIterator[pb.TrainingRunEvent]:
        """Yields events until the final state."""
        while True:
            request = service_pb.WatchTrainingRunRequest(name=self.name, after_sequence=len(self.events))
            try:
                async for answer in self._client.training_runs.WatchTrainingRun(request, wait_for_ready=True):
                    assert answer.event.sequence == len(self.events) + 1
                    self.events.append(answer.event)
                    yield answer.event
                    if answer.event.run.state in FINAL_RUN_STATES:
                        return
            except Unavailable:
                continue

    async def some(self, count: int) -> None:
        """Waits for so many more events, or the final state."""
        async with asyncio.timeout(self._wait_s):
            async for _ in self.follow():
                count -= 1
                if not count:
                    return

    async def until_step(self, step: int) -> None:
        """Waits until a step is announced."""
        async with asyncio.timeout(self._wait_s):
            async for event in self.follow():
                if event.HasField("step") and event.step.step >= step:
                    return
        raise AssertionError(f"the run ended before step {step}: {self.story()}")

    async def until_notice(self, text: str) -> None:
        """Waits until a notice holds a text."""
        async with asyncio.timeout(self._wait_s):
            async for event in self.follow():
                if text in event.notice.message:
                    return
        raise AssertionError(f"no notice said {text!r}: {self.story()}")

    async def until_state(self, state: pb.TrainingRunState) -> None:
        """Waits until the run is in a state."""
        async with asyncio.timeout(self._wait_s):
            async for event in self.follow():
                if event.run.state == state:
                    return
        raise AssertionError(f"the run ended before its state was {state}: {self.story()}")

    async def end(self) -> pb.TrainingRun:
        """Waits for the final state."""
        async with asyncio.timeout(self._wait_s):
            async for event in self.follow():
                if event.run.state in FINAL_RUN_STATES:
                    return event.run
        raise AssertionError("the events ended without a final state")

    def story(self) -> str:
        """Tells what happened, for a failed test."""
        return "\n".join([*self.notices(), self._stack.log_tail("algorithm")])

    def notices(self) -> list[str]:
        return [e.notice.message for e in self.events if e.HasField("notice")]


async def start_run(
    stack: LocalStack,
    client: Services,
    root: Path,
    name: str,
    *,
    policy: str = POLICY,
    settings: Mapping[str, object] = SETTINGS,
) -> Watcher:
    """Creates the small GRPO run of these tests."""
    inputs = await publish_training_inputs(client, root, policy=policy)
    return Watcher(stack, client, await create_run(client, name, inputs, settings, policy=policy))
