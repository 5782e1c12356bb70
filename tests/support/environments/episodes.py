"""Tasks of an integration, run by a real runner before a real proxy, and what their attempts scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from tests.support.cli.commands import run_program
from tests.support.frameworks.traced import ENVIRONMENTS, OWN_PYTHON, ROOT, Stage
from tests.support.runner.harness import bundle_of, rollouts_of, spec_of

__all__ = ["FOLDER", "Scored", "native", "scored", "scored_by"]

FOLDER = Path(__file__).parent
LISTS = ROOT / "tools" / "frameworks"
LIMIT_S = 600.0
ATTEMPT_S = 300.0
SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the episodes of an environment scored, in the order of its tasks."""

    rollouts: list[rollout_pb2.Rollout]

    @property
    def scores(self) -> list[float]:
        """The reward of each; not a number for one that failed."""
        return [self.rewards(number).get("reward", float("nan")) for number in range(len(self.rollouts))]

    @property
    def failures(self) -> list[str]:
        """Messages of attempts that failed."""
        return [each.attempts[-1].failure_message for each in self.rollouts if each.attempts[-1].failure_message]

    def rewards(self, number: int) -> dict[str, float]:
        """Returns the final rewards of a task by dimension."""
        attempt = self.rollouts[number].attempts[-1]
        return {each.dimension: each.value for each in attempt.rewards if not each.HasField("step")}


async def native(environment: str, program: str, *arguments: str) -> Any:
    """Runs a program of this folder with the Python of an environment; returns what it printed last, read as JSON."""
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        assert (LISTS / "large" / f"{environment}.in").exists(), "run `make test-frameworks`"
        pytest.skip(f"needs a large environment: tools/framework_envs.sh {environment}")
    command = [str(python), str(FOLDER / program), str(FOLDER), *arguments]
    done = await run_program(command, {"PYTHONPATH": ""}, LIMIT_S)
    assert done.status == 0, done.stdout + done.stderr
    return json.loads(done.last_line)


async def scored(
    stage: Stage,
    environment: str,
    target: str,
    tasks: Sequence[Mapping[str, Any]],
    *,
    files: Sequence[str] = (),
    slots: int = SLOTS,
) -> Scored:
    """Runs a Python agent on tasks in an environment of its own.

    Args:
        stage: Store, proxy and model.
        environment: Name of the agent's virtual environment.
        target: The agent.
        tasks: Its tasks.
        files: Files of this folder in the agent's bundle.
        slots: Attempts at once.
    """
    bundle = bundle_of({name: (FOLDER / name).read_text() for name in files})

    def spec(published: str) -> bytes:
        return spec_of(bundle=published, python=target, venv=ENVIRONMENTS / environment)

    return await scored_by(stage, bundle, spec, tasks, slots=slots)


async def scored_by(
    stage: Stage,
    bundle: bytes,
    spec: Callable[[str], bytes],
    tasks: Sequence[Mapping[str, Any]],
    *,
    slots: int = SLOTS,
) -> Scored:
    """Runs an agent on tasks; `spec` makes its specification of the name of its bundle."""
    agent = await stage.publish("agent", spec(await stage.publish("bundle", bundle)))
    made = rollouts_of(agent, [dict(task) for task in tasks], max_attempts=1, timeout_s=ATTEMPT_S)
    async with stage.runner(OWN_PYTHON, slots=slots):
        request = rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=made)
        names = [rollout.name for rollout in (await stage.stubs.rollouts.BatchCreateRollouts(request)).rollouts]
        ended = await stage._ended(set(names), LIMIT_S)
    return Scored(rollouts=[ended[name] for name in names])
