"""The GRPO demo on a Ray cluster of three nodes, of which one is killed in the middle.

Method: three raylets on this machine, one of them the head; the trainer's two ranks are on two nodes, the three engines where Ray places
them, store, proxy, algorithm service and two runners beside the cluster. After a few steps a node that holds a rank is killed, with
its raylet and all that it has started. Ranks and engines that were on it are started again on the other two; the run resumes from
its newest checkpoint. Every finished group must be dealt with once, no rollout may be trained on twice, and the policy must have
learned what it learns on one machine. Run `python -m benchmarks.machines.demo [--short]`; writes
benchmarks/results/machines_demo.json. The short form has a very small model, is cancelled some steps
after the loss, and asks nothing of what is learned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import outcome
from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1.training_run_service_pb2 import CancelTrainingRunRequest, ListTrainingRunsRequest
from fulmen.rpc.services import Services, connect
from fulmen.store.v1.rollout_pb2 import ROLLOUT_STATE_FAILED
from fulmen_algorithm.cluster.wire import NODE_VARIABLE
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.module_processes import RANK
from tests.support.algorithm.ray_nodes import RayNodes, ray_cluster
from tests.support.algorithm.runs import eventually, list_rollouts
from tests.support.algorithm.small_training import SETTINGS, Watcher, start_run
from tests.support.algorithm.training import check_books, finished_groups, read_consumed
from tests.support.stack import running_stack, stack_targets

ROOT = Path(__file__).resolve().parents[2]
NODES = 3
NODE_CPUS = 3
"""Two nodes hold everything."""
ENGINES = 3
ENDLESS = 10_000
LIMIT_S = 3600.0
LOWEST_AFTER = 0.95
PLACED: Mapping[str, Any] = {
    "parallel": {"kind": "ddp", "ranks": 2, "cluster": "ray", "affinity": "own_nodes"},
    "engine": {"kind": "embedded", "replicas": ENGINES, "cluster": "ray", "gpus": 0},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        state: Final state of the run.
        failure: Why it failed; empty if it did not.
        steps: Steps of the run.
        groups: Finished groups, each dealt with once.
        rollouts: Rollouts.
        repeated: Of these, those that needed another attempt.
        failed: Of these, those that failed in the end.
        killed_at: Step after which the node was killed.
        back_s: Time from then to the next step, in seconds.
        seconds: Time of the run, in seconds.
        before: Validation accuracy at the start; 0 if it is not measured.
        after: At the end.
        notices: What the run said.
    """

    state: str
    failure: str
    steps: int
    groups: int
    rollouts: int
    repeated: int
    failed: int
    killed_at: int
    back_s: float
    seconds: float
    before: float
    after: float
    notices: Sequence[str]


async def run(folder: Path, *, short: bool) -> Outcome:
    """Runs the demo in a folder of a short path.

    Raises:
        AssertionError: if a group is lost, or a rollout is trained on twice.
    """
    with ray_cluster(folder, nodes=NODES, cpus=NODE_CPUS) as ray:
        clusters = {
            "ray": {"kind": "ray", "address": ray.address, "token_file": str(ray.token), "python": sys.executable}
        }
        environment = {
            "FULMEN_ALGORITHM_CLUSTERS": json.dumps(clusters),
            "FULMEN_ALGORITHM_CLUSTER_SILENCE_S": "20",
        }
        async with (
            running_stack(folder / "stack", runners=2, environment=environment) as stack,
            connect(stack_targets(stack), token=stack.client_token) as client,
        ):
            return await _trained(ray, stack, client, folder, short=short)


async def _trained(ray: RayNodes, stack: LocalStack, client: Services, folder: Path, *, short: bool) -> Outcome:
    begun = time.monotonic()
    command = None if short else await _command(folder)
    watcher = await (_short(stack, client) if short else _long(stack, client))
    await watcher.until_step(2 if short else 10)
    await asyncio.to_thread(ray.kill, node_of_a_rank(ray.killable))
    killed, killed_at = time.monotonic(), newest_step(watcher.events)
    await watcher.until_notice("Resuming from the checkpoint of step")
    await watcher.until_step(1)
    back_s = time.monotonic() - killed
    if short:
        # It has no end of its own, so that the node is lost in its middle however fast the machine is.
        await watcher.until_step(newest_step(watcher.events) + 2)
        await client.training_runs.CancelTrainingRun(CancelTrainingRunRequest(name=watcher.name))
    run = await watcher.end()
    feed = await finished_groups(client, run.name)
    consumed = read_consumed(folder / "stack/algorithm/runs/default" / run.name.rpartition("/")[2])
    check_books(consumed, feed, steps=consumed[-1]["step"])
    if command is not None:
        await command.wait()
    rollouts = await list_rollouts(client, training_run=run.name)
    before, after = (0.0, 0.0) if short else _accuracies(folder)
    return Outcome(
        state=pb.TrainingRunState.Name(run.state),
        failure=run.failure_message,
        steps=consumed[-1]["step"],
        groups=len(consumed),
        rollouts=len(rollouts),
        repeated=sum(rollout.ended_attempt_count > 1 for rollout in rollouts),
        failed=sum(rollout.state == ROLLOUT_STATE_FAILED for rollout in rollouts),
        killed_at=killed_at,
        back_s=round(back_s, 1),
        seconds=round(time.monotonic() - begun, 1),
        before=before,
        after=after,
        notices=watcher.notices(),
    )


async def _short(stack: LocalStack, client: Services) -> Watcher:
    settings = {**SETTINGS, **PLACED, "steps": ENDLESS, "checkpoint_every": 1}
    begun = await start_run(stack, client, ROOT, "demo", settings=settings)
    return Watcher(stack, client, begun.name, wait_s=LIMIT_S)


async def _command(folder: Path) -> asyncio.subprocess.Process:
    """Starts `fulmen train` with the arithmetic example, whose last stage is on the cluster."""
    example = folder / "arithmetic"
    shutil.copytree(ROOT / "examples/arithmetic", example)
    stages = f"{(example / 'train.toml').read_text()}checkpoint_every = 2\n"
    for name, value in PLACED.items():
        pairs = ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items())
        stages += f"{name} = {{ {pairs} }}\n"
    (example / "train.toml").write_text(stages)
    words = ("train", str(example / "train.toml"), "--report-dir", str(folder / "report"))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fulmen_cli", *words, "--state-dir", str(folder / "stack")
    )


async def _long(stack: LocalStack, client: Services) -> Watcher:
    """Waits for the run of the last stage."""

    async def last_stage() -> str | None:
        answer = await client.training_runs.ListTrainingRuns(ListTrainingRunsRequest())
        return next((run.name for run in answer.training_runs if run.algorithm == "grpo"), None)

    name = await eventually(last_stage, what="the run of the last stage is created", deadline_s=LIMIT_S)
    return Watcher(stack, client, name, wait_s=LIMIT_S)


def _accuracies(folder: Path) -> tuple[float, float]:
    """Returns the validation accuracy before and after the last stage."""
    results = json.loads((folder / "report/summary.json").read_text())["training_runs"][-1]["results"]
    return results["validation_accuracy_before"], results["validation_accuracy_after"]


def newest_step(events: Sequence[pb.TrainingRunEvent]) -> int:
    """Returns the step that was announced last; 0 if none was."""
    return next((event.step.step for event in reversed(events) if event.HasField("step")), 0)


def node_of_a_rank(nodes: Sequence[str]) -> str:
    """Returns one of some nodes that has a rank of the run."""
    for process in psutil.process_iter():
        try:
            if RANK in process.cmdline() and (guardian := process.parent()) is not None:
                node = guardian.environ().get(NODE_VARIABLE, "").rpartition("/")[2]
                if node in nodes:
                    return node
        except psutil.Error:
            continue
    raise AssertionError(f"no rank is on one of {nodes}")


def main() -> None:
    """Runs the demo and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a very small model and a few steps; writes nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fm-") as folder:
        found = asyncio.run(run(Path(folder), short=arguments.short))
    claims = [
        outcome.claim("rollouts that failed", found.failed, "rollouts", goal=0, better="lower"),
        outcome.claim("rollouts with more than one attempt", found.repeated, "rollouts", goal=0, better="lower"),
    ]
    if arguments.short:
        outcome.show(None, claims)
        return
    succeeds = found.state == "TRAINING_RUN_STATE_SUCCEEDED"
    claims.append(outcome.claim("runs that succeed", succeeds, "runs", goal=1, better="higher"))
    claims.append(outcome.claim("accuracy after", found.after, "share", goal=LOWEST_AFTER, better="higher"))
    raw = {name: getattr(found, name) for name in Outcome.__dataclass_fields__}
    outcome.write("machines_demo", method=__doc__ or "", raw=raw, claims=claims)


if __name__ == "__main__":
    main()
