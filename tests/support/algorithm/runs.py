"""Starts training runs and rollouts over a stack, and waits for their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import DeadlineExceeded, Unavailable
from fulmen.ids import DEFAULT_PROJECT, training_run_name
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen.train_toml.train import AgentConfig, load_train_config
from fulmen.training.bundle import pack_bundle
from fulmen.training.plan import training_run
from fulmen.training.publish import publish
from fulmen.training.task_files import read_datasets

__all__ = [
    "FINAL_ROLLOUT_STATES",
    "FINAL_RUN_STATES",
    "create_rollouts",
    "ended_rollout",
    "eventually",
    "list_rollouts",
    "publish_agent",
    "read_run",
    "start_run",
]

T = TypeVar("T")

DEADLINE_S = 90.0
POLL_INTERVAL_S = 0.05
PAGE_SIZE = 1000

FINAL_ROLLOUT_STATES = frozenset(
    {
        rollout_pb2.ROLLOUT_STATE_SUCCEEDED,
        rollout_pb2.ROLLOUT_STATE_FAILED,
        rollout_pb2.ROLLOUT_STATE_CANCELLED,
    }
)
FINAL_RUN_STATES = frozenset(
    {
        training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED,
        training_run_pb2.TRAINING_RUN_STATE_FAILED,
        training_run_pb2.TRAINING_RUN_STATE_CANCELLED,
    }
)


async def eventually(check: Callable[[], Awaitable[T | None]], *, what: str, deadline_s: float = DEADLINE_S) -> T:
    """Asks until the answer is neither None nor False; a service that is away counts as no answer yet.

    Raises:
        AssertionError: if that takes longer than the deadline.
    """
    ends = time.monotonic() + deadline_s
    last: object = None
    while time.monotonic() < ends:
        try:
            last = await check()
        except (Unavailable, DeadlineExceeded) as error:
            last = error
        else:
            if last is not None and last is not False:
                return last
        await asyncio.sleep(POLL_INTERVAL_S)
    raise AssertionError(f"Within {deadline_s:.0f} s it did not happen that {what}; last: {last}")


async def start_run(
    client: Services, folder: Path, name: str, *, stage: int = 0, settings: Mapping[str, object] | None = None
) -> str:
    """Publishes what the train.toml of a folder names and creates the run of one of its stages.

    Args:
        client: the services.
        folder: holds `train.toml`.
        name: the run's id.
        stage: which stage, from 0.
        settings: replace those of the file.

    Returns:
        `projects/{project}/trainingRuns/{id}`.
    """
    config = load_train_config(folder / "train.toml")
    published = await publish(
        client,
        name=config.name,
        agent=config.agent,
        bundle=pack_bundle(config.folder),
        datasets=read_datasets(config.data),
    )
    chosen = config.stages[stage]
    merged = type(chosen)(algorithm=chosen.algorithm, settings={**chosen.settings, **(settings or {})})
    offered = await client.training_runs.ListAlgorithms(training_run_service_pb2.ListAlgorithmsRequest())
    read = {
        each.name: (*each.required_inputs, *each.optional_inputs, *each.any_of_inputs) for each in offered.algorithms
    }
    run = training_run(
        config,
        merged,
        name=training_run_name(DEFAULT_PROJECT, name),
        inputs=published.inputs,
        read=read,
        continues=False,
    )
    request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run, request_id=name)
    created = await client.training_runs.CreateTrainingRun(request)
    return str(created.training_run.name)


async def read_run(client: Services, name: str) -> training_run_pb2.TrainingRun:
    answer = await client.training_runs.GetTrainingRun(training_run_service_pb2.GetTrainingRunRequest(name=name))
    return answer.training_run


async def list_rollouts(client: Services, *, training_run: str = "") -> list[rollout_pb2.Rollout]:
    """Lists rollouts, newest first, without attempts; all of them or those of a run."""
    found: list[rollout_pb2.Rollout] = []
    request = rollout_service_pb2.ListRolloutsRequest(training_run=training_run, page_size=PAGE_SIZE)
    while True:
        page = await client.rollouts.ListRollouts(request)
        found += page.rollouts
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def publish_agent(client: Services, folder: Path, name: str, agent: AgentConfig) -> str:
    """Publishes the agent whose files are in a folder; returns its version."""
    published = await publish(client, name=name, agent=agent, bundle=pack_bundle(folder), datasets={})
    return published.inputs["agent"]


async def create_rollouts(client: Services, agent: str, inputs: list[bytes]) -> list[str]:
    """Creates one rollout per input; returns their names."""
    rollouts = [rollout_pb2.Rollout(agent=agent, input=each) for each in inputs]
    answer = await client.rollouts.BatchCreateRollouts(
        rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts)
    )
    return [rollout.name for rollout in answer.rollouts]


async def ended_rollout(client: Services, name: str) -> rollout_pb2.Rollout:
    """Waits until a rollout is final; returns it with its attempts."""

    async def final() -> rollout_pb2.Rollout | None:
        answer = await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
        return answer.rollout if answer.rollout.state in FINAL_ROLLOUT_STATES else None

    return await eventually(final, what=f"{name} is final")
