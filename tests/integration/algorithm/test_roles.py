"""Agents with roles through the real services: one policy for all, an adapter for each, and policies of two runs."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.llm_proxy.v1 import route_service_pb2
from fulmen.rpc.services import Services, connect
from fulmen.store.v1 import resource_service_pb2
from fulmen.trajectories import Trajectory
from fulmen.trajectories.stored import read_stored
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.small_training import SETTINGS, Watcher
from tests.support.algorithm.training import (
    check_books,
    create_run,
    finished_groups,
    publish_training_inputs,
    read_consumed,
)
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.long,
    pytest.mark.serial,
    pytest.mark.timeout(900),
]

AGENT = """\
import asyncio

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def ask(role, model, text):
    completion = await client.chat.completions.create(
        model=model, messages=[{{"role": "user", "content": text}}], extra_headers={{"x-fulmen-agent": role}}
    )
    return completion.choices[0].message.content or ""


async def solve(task):
    question = task["input"]["question"]
    plan = await ask("planner", "{planner}", question + "?")
    return [plan, *await asyncio.gather(*(ask("solver", "{solver}", part + "=") for part in question[:2]))]


def grade(task, outcome):
    plan, *parts = [float(sum(map(ord, text)) % 2) for text in outcome]
    return {{"reward": plan * parts[0], "plan": plan, "parts": sum(parts) / len(parts)}}
"""
STEPS = 2
SHORT = {
    **SETTINGS,
    "steps": STEPS,
    "checkpoint_every": 1,
    "validate_every": STEPS,
    # A third of the groups have equal rewards: by default one step in a hundred would find none to train on.
    "refill_limit": 20.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    stack: LocalStack
    client: Services
    folder: Path
    root: Path

    async def begin(self, name: str, policy: str, *, planner: str, solver: str, **settings: object) -> Watcher:
        """Creates a run of an agent whose roles ask for these models."""
        agent = AGENT.format(planner=planner, solver=solver).encode()
        inputs = await publish_training_inputs(self.client, self.root, agent=agent)
        run = await create_run(self.client, name, inputs, {**SHORT, **settings}, policy=policy)
        return Watcher(self.stack, self.client, run)

    async def finished(self, watcher: Watcher) -> list[dict[str, float]]:
        """Waits for a good end; returns the metrics of every training step."""
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, f"{run.failure_message}\n{watcher.story()}"
        return [dict(e.step.values) for e in watcher.events if e.HasField("step") and e.step.step]

    async def trained(self, name: str) -> dict[int, list[Trajectory]]:
        """Reads what the policies did in the rollouts that each step of a run trained on."""
        found: dict[int, list[Trajectory]] = {}
        for line in read_consumed(self.folder / "algorithm/runs/default" / name):
            stored = await read_stored(self.client, line["trained"]) if line["trained"] else []
            found.setdefault(line["step"], []).extend(s.trajectory for s in stored if s.trajectory is not None)
        return found

    async def adapters(self, policy: str, count: int) -> list[dict[str, str]]:
        """Returns digests of the adapters of each version, by role."""
        names = [f"resources/policy.{policy}/versions/{n + 1}" for n in range(count)]
        answer = await self.client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=names))
        found = []
        for resource in answer.resources:
            described = json.loads(resource.content)
            assert described["kind"] == "lora"
            found.append(digests(Path(described["path"]), described["adapters"]))
        return found


@asynccontextmanager
async def standing(folder: Path, root: Path) -> AsyncIterator[Stand]:
    """Starts the services, which keep all versions."""
    environment = {"FULMEN_ALGORITHM_KEEP_MODELS": "9", "FULMEN_ALGORITHM_KEEP_CHECKPOINTS": "9"}
    async with (
        running_stack(folder, environment=environment) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        yield Stand(stack=stack, client=client, folder=folder, root=root)


def digests(folder: Path, roles: list[str]) -> dict[str, str]:
    return {r: hashlib.sha256((folder / r / "adapter_model.safetensors").read_bytes()).hexdigest() for r in roles}


def sampled(found: list[Trajectory], role: str) -> list[int]:
    """Returns how many tokens each row of a role sampled."""
    return [sum(row.loss_mask) for trajectory in found for row in trajectory.of_agent(role)]


async def check_one_role_of_a_shared_policy(stand: Stand) -> None:
    """Trains on the planner's rows alone, of a policy that both roles call."""
    watcher = await stand.begin("shared", "tiny", planner="tiny", solver="tiny", roles={"train": ["planner"]})
    metrics = await stand.finished(watcher)
    trained = await stand.trained("shared")
    assert len(metrics) == STEPS
    for step, values in enumerate(metrics, start=1):
        planner, solver = sampled(trained[step], "planner"), sampled(trained[step], "solver")
        assert len(solver) == 2 * len(planner) > 0
        assert (values["rows"], values["role_planner_rows"]) == (len(planner), len(planner))
        assert values["tokens"] == values["role_planner_tokens"] == sum(planner)
        assert "role_solver_rows" not in values


async def check_an_adapter_for_each_role(stand: Stand) -> None:
    """Trains the solver's adapter and leaves the planner's, through a death of the service."""
    models = {"planner": "team.planner", "solver": "team.solver"}
    adapters = {"lora": {"rank": 4, "roles": list(models)}, "learning_rate": 1e-2, "warmup_steps": 0}
    roles = {"train": ["solver"], "baseline": "role", "rewards": {"solver": "parts"}}
    watcher = await stand.begin("adapters", "team", **models, **adapters, roles=roles)
    await watcher.until_step(1)
    await stand.stack.kill_service("algorithm")
    await stand.stack.start_service("algorithm")
    metrics = await stand.finished(watcher)
    assert all(values["tokens"] == values["role_solver_tokens"] > 0 for values in metrics)
    assert "validation_role_solver_reward" in metrics[-1]
    run_folder = stand.folder / "algorithm/runs/default/adapters"
    check_books(
        read_consumed(run_folder),
        await finished_groups(stand.client, "projects/default/trainingRuns/adapters"),
        steps=STEPS,
    )
    # Every row was sampled by the model of its role, and by versions of the policy.
    trained = await stand.trained("adapters")
    rows = [row for found in trained.values() for trajectory in found for row in trajectory.rows]
    expected = {(role, model, "team") for role, model in models.items()}
    assert {(r.agent_name, r.calls[0].call.model, r.policy) for r in rows} == expected
    versions = await stand.adapters("team", STEPS + 1)
    assert {v.version for row in rows for v in row.versions} <= set(range(1, len(versions) + 1))
    assert len({version["planner"] for version in versions}) == 1
    assert len({version["solver"] for version in versions}) == len(versions)
    newest = sorted((run_folder / "checkpoints").iterdir())[-1]
    assert digests(newest / "model", list(models)) == versions[-1]
    listed = await stand.client.routes.ListRoutes(route_service_pb2.ListRoutesRequest())
    served = {route.name: route.targets[0].policy_version for route in listed.routes}
    assert {served[f"routes/{model}"] for model in ("team", *models.values())} == {len(versions)}


async def check_policies_of_two_runs(stand: Stand) -> None:
    """Trains a policy whose agent also calls the policy of another run."""
    metrics = await stand.finished(await stand.begin("other", "other", planner="tiny", solver="other"))
    trained = await stand.trained("other")
    for step, values in enumerate(metrics, start=1):
        assert {r.policy for t in trained[step] for r in t.of_agent("planner")} == {"tiny"}
        assert values["tokens"] == sum(sampled(trained[step], "solver")) > 0
        assert "role_planner_rows" not in values


async def test_roles_train_with_one_policy_an_adapter_each_or_a_policy_each(short_tmp_path, repository_root):
    async with standing(short_tmp_path, repository_root) as stand, asyncio.timeout(840):
        await check_one_role_of_a_shared_policy(stand)
        await check_policies_of_two_runs(stand)
        await check_an_adapter_for_each_role(stand)
