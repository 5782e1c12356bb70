"""A training run with vLLM as the engine, whose vLLM is killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_service_pb2
from fulmen.store.v1.rollout_pb2 import Rollout
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.runs import FINAL_RUN_STATES
from tests.support.algorithm.training import create_run, publish_training_inputs
from tests.support.service_kit.otlp_collector import Collector

# vLLM's attention on a CPU wants heads of 32; room for long answers.
BUILDER = b"""\
import json
import pathlib

import make_model


def build(output_dir, seed=0):
    make_model.build(output_dir, seed, hidden=64, layers=1, heads=2, mlp=32)
    config = pathlib.Path(output_dir, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
"""
KILLED_AT = 2
STEPS = 6  # enough that the kill comes before the last, however late the event of the step is read
SETTINGS = {
    "steps": STEPS,
    "prompts_per_step": 2,
    "group_size": 4,
    "minibatches": 1,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "max_staleness": 0,
    "refill_limit": 20.0,  # a policy that learns makes groups of equal rewards, and every step is to train
    "max_tokens": 4,
    "mask_truncated": False,
    "rollout_timeout_s": 600.0,
    "validate_every": STEPS,
    "engine": {
        "kind": "vllm",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_sequences": 16,
    },
    "engine_mismatch": {"warn": 0.0001, "stop": 0.001},
}
WAIT_S = 900  # two starts of vLLM on a machine that is busy with the other half of the suite


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended, the stack that still serves its policy, and the traces of its services."""

    collector: Collector
    stack: LocalStack
    client: Services
    run: pb.TrainingRun
    events: list[pb.TrainingRunEvent]
    killed: list[int]
    killed_ns: int

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        return [event.step.values for event in self.events if event.HasField("step")]

    @property
    def notices(self) -> list[str]:
        return [event.notice.message for event in self.events if event.HasField("notice")]

    @property
    def served_ns(self) -> list[int]:
        """Returns when vLLM began to serve: at the start and after the kill."""
        return [e.event_time.ToNanoseconds() for e in self.events if "vLLM serves after" in e.notice.message]

    async def troubled_rollouts(self) -> list[Rollout]:
        """Returns the rollouts of which an attempt failed, with their attempts."""
        request = rollout_service_pb2.ListRolloutsRequest(
            training_run=self.run.name, page_size=1000, filter="ended_attempt_count > 1 OR state = FAILED"
        )
        listed = (await self.client.rollouts.ListRollouts(request)).rollouts
        whole = [rollout_service_pb2.GetRolloutRequest(name=rollout.name) for rollout in listed]
        return [(await self.client.rollouts.GetRollout(each)).rollout for each in whole]


async def train(stack: LocalStack, client: Services, root: Path, collector: Collector) -> Trained:
    """Carries a run out; vLLM's own process is killed after its second step."""
    inputs = await publish_training_inputs(client, root, builder=BUILDER)
    name = await create_run(client, "on-vllm", inputs, SETTINGS)
    events: list[pb.TrainingRunEvent] = []
    killed: list[int] = []
    killed_ns = 0
    async with asyncio.timeout(WAIT_S):
        async for answer in client.training_runs.WatchTrainingRun(service_pb.WatchTrainingRunRequest(name=name)):
            events.append(answer.event)
            if answer.event.step.step == KILLED_AT and not killed:
                killed, killed_ns = vllm_processes(stack), time.time_ns()
                os.kill(killed[0], signal.SIGKILL)
            if answer.event.run.state in FINAL_RUN_STATES:
                return Trained(
                    collector=collector,
                    stack=stack,
                    client=client,
                    run=answer.event.run,
                    events=events,
                    killed=killed,
                    killed_ns=killed_ns,
                )
    raise AssertionError("the events ended without a final state")


def vllm_processes(stack: LocalStack) -> list[int]:
    """Lists the processes of the stack's vLLM: its server first, then those that it has started."""
    found = [p for p in descendants(stack.process("algorithm").pid) if b"vllm" in command_of(p).lower()]
    return [p for p in found if b"guardian" not in command_of(p)]


def descendants(pid: int) -> list[int]:
    """Lists the children of a process, and theirs, parents first."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
