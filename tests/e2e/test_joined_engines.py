"""An engine of another machine joins a run: it fetches what the run publishes, gets its share of the calls, and leaves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.llm_proxy.v1 import backend_service_pb2
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from tests.support.algorithm.joined_engines import weight_agent
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually, read_run
from tests.support.algorithm.training import (
    AGENT,
    check_books,
    create_run,
    finished_groups,
    publish_training_inputs,
    read_consumed,
)
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]
SHORT = pytest.mark.long(short=True)
LONG = pytest.mark.long

STEPS = 60
# Slow enough that the engine joins long before the run ends.
SLOW_AGENT = AGENT.replace(b"    completion =", b"    await asyncio.sleep(1.0)\n    completion =").replace(
    b"from openai", b"import asyncio\n\nfrom openai"
)
SETTINGS = {"steps": STEPS, "prompts_per_step": 2, "group_size": 4, "minibatches": 1, "refill_limit": 0}
MIN_CALLS = 8
LIMIT_S = 240.0


class Joined:
    """A run with an engine that has joined it, and is called."""

    def __init__(self, world: World, run: str) -> None:
        self._world = world
        self.run = run
        self.policy = run.rpartition("/")[2]
        self.own = f"backends/engine-{self.policy}"

    async def backends(self) -> Mapping[str, Any]:
        """Returns the health of the backends of the run's engines, by name."""
        answer = await self._world.client.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())
        return {health.name: health for health in answer.backends if health.name.endswith(f"-{self.policy}")}

    async def is_called(self, *, since: int = 0) -> Any:
        """Waits until the joined engine has got calls, and none of them has failed; returns its health."""

        async def called() -> Any:
            found = await self.backends()
            assert (await read_run(self._world.client, self.run)).state not in FINAL_RUN_STATES, found
            joined = [health for name, health in found.items() if name != self.own]
            return next((each for each in joined if each.request_count >= since + MIN_CALLS), None)

        health = await eventually(called, what="the joined engine is called", deadline_s=LIMIT_S)
        assert health.failure_count == 0
        return health

    async def succeeds(self) -> None:
        """Waits for the end of the run, and checks its books."""

        async def ended() -> training_run_pb2.TrainingRun | None:
            found = await read_run(self._world.client, self.run)
            return found if found.state in FINAL_RUN_STATES else None

        done = await eventually(ended, what="the run ends", deadline_s=LIMIT_S)
        assert done.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED, done.failure_message
        feed = await finished_groups(self._world.client, self.run)
        check_books(read_consumed(self._world.state_dir / "algorithm/runs/default" / self.policy), feed, steps=STEPS)


async def started(world: World, repository_root: Path, policy: str, **settings: object) -> Joined:
    """Creates a run."""
    inputs = await publish_training_inputs(world.client, repository_root, policy=policy, agent=SLOW_AGENT)
    return Joined(world, await create_run(world.client, policy, inputs, SETTINGS | settings, policy=policy))


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        pytest.param("joined-delta", {"weights": {"kind": "delta"}}, marks=SHORT),
        pytest.param("joined-lora", {"lora": {"rank": 4}}, marks=LONG),
    ],
)
async def test_a_joined_engine_serves_every_version_and_a_killed_one_costs_nothing(
    world: World, repository_root: Path, tmp_path: Path, policy: str, settings: Mapping[str, Any]
) -> None:
    joined = await started(world, repository_root, policy, **settings)
    async with weight_agent(world, joined.run, tmp_path / "gpu-7") as agent:
        await joined.is_called()
        agent.process.send_signal(signal.SIGKILL)
        await joined.succeeds()
    assert set(await joined.backends()) == {joined.own}


@SHORT
async def test_an_engine_that_is_asked_to_stop_ends_its_calls_and_fails_none(
    world: World, repository_root: Path, tmp_path: Path
) -> None:
    # It outlasts the test, however slow the machine is.
    joined = await started(world, repository_root, "joined-leaves", steps=1000)
    async with weight_agent(world, joined.run, tmp_path / "gpu-7", drain_grace_s=90) as agent:
        await joined.is_called()
        agent.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(agent.process.wait, LIMIT_S) == 0
    log = (tmp_path / "gpu-7" / "log").read_text()
    assert '"leaving"' in log
    assert "drain_cut_short" not in log
    assert set(await joined.backends()) == {joined.own}
    asked = rollout_service_pb2.ListRolloutsRequest(training_run=joined.run, page_size=1000)
    before = len(await succeeded(world, asked))

    async def all_have_ended() -> bool:
        return len(await succeeded(world, asked)) > before + 4 * MIN_CALLS

    # Those that were running then are among them.
    await eventually(all_have_ended, what="rollouts end without the engine", deadline_s=LIMIT_S)
    found = (await world.client.rollouts.ListRollouts(asked)).rollouts
    await world.client.training_runs.CancelTrainingRun(
        training_run_service_pb2.CancelTrainingRunRequest(name=joined.run)
    )
    # None was tried again, as those are whose calls fail.
    assert {rollout.ended_attempt_count for rollout in found} <= {0, 1}
    assert not [rollout for rollout in found if rollout.state == rollout_pb2.ROLLOUT_STATE_FAILED]


async def succeeded(world: World, asked: rollout_service_pb2.ListRolloutsRequest) -> list[rollout_pb2.Rollout]:
    found = (await world.client.rollouts.ListRollouts(asked)).rollouts
    return [rollout for rollout in found if rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED]


@LONG
async def test_a_joined_engine_outlives_the_algorithm_service_and_joins_again(
    world: World, repository_root: Path, tmp_path: Path
) -> None:
    joined = await started(world, repository_root, "joined-again")
    async with weight_agent(world, joined.run, tmp_path / "gpu-7"):
        before = await joined.is_called()
        await world.stack.kill_service("algorithm")
        await world.stack.start_service("algorithm")
        await joined.is_called(since=before.request_count)
        await joined.succeeds()
