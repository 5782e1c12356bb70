"""Builds the training runs of a configuration: one per stage."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.ids import training_run_name
from fulmen.train_toml.train import PolicyConfig, StageConfig, TrainConfig

__all__ = ["AGENT_INPUT", "RunNames", "stage_problem", "training_run"]

# What a configuration can give to an algorithm that is not known: the service's answer then names those that are.
ALL_INPUTS: Final = (
    "agent", "train_tasks", "validation_tasks", "test_tasks", "demonstrations", "validation_demonstrations",
    "preferences", "prompt", "scores", "rollouts", "bundle",
)  # fmt: skip
AGENT_INPUT: Final = "inputs.agent"
MAX_ID_LENGTH: Final = 63
RANDOM_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNames:
    """Names of the runs of one configuration.

    Attributes:
        project: `projects/{project}`.
        prefix: Prefix of the ids, such as `arithmetic-20260314-101500-x7k2`.
    """

    project: str
    prefix: str

    @classmethod
    def now(cls, project: str, name: str) -> RunNames:
        """Returns names that are unique among the runs of the configuration `name`."""
        stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(RANDOM_BYTES)}"
        return cls(project=project, prefix=f"{name}-{stamp}")

    def of(self, number: int, stage: StageConfig) -> str:
        """Returns the name of a stage's run, whose id is such as `arithmetic-20260314-101500-x7k2-1-sft`."""
        # Names of algorithms may have underscores, ids of runs may not.
        algorithm = stage.algorithm.replace("_", "-")
        return training_run_name(self.project, f"{self.prefix}-{number}-{algorithm}"[:MAX_ID_LENGTH].rstrip("-"))


def training_run(
    config: TrainConfig,
    stage: StageConfig,
    *,
    name: str,
    inputs: Mapping[str, str],
    read: Mapping[str, Collection[str]],
    continues: bool,
    trains: bool = True,
) -> training_run_pb2.TrainingRun:
    """Builds the run of a stage.

    Args:
        config: the configuration.
        stage: the stage.
        name: the run's name.
        inputs: every published version by use; the run gets those that its algorithm reads.
        read: the inputs that each algorithm reads; an input without effect is refused by the service.
        continues: whether an earlier stage trains the policy; the run then starts from its result.
        trains: whether the algorithm trains weights; if not, it gets a policy only if there is a version of it.
    """
    policy = _policy(config.policy, continues=continues) if config.policy.name else None
    if policy is not None and not trains and policy.WhichOneof("initial") in ("base", "build", "path"):
        policy = None
    wanted = tuple(use for use in read.get(stage.algorithm, ALL_INPUTS) if use != "bundle")
    if policy is not None and policy.WhichOneof("initial") == "build":
        wanted = (*wanted, "bundle")
    return training_run_pb2.TrainingRun(
        name=name,
        display_name=f"{config.name}: {stage.algorithm}",
        algorithm=stage.algorithm,
        settings_json=json.dumps(dict(stage.settings), sort_keys=True),
        policy=policy,
        inputs={use: inputs[use] for use in wanted if use in inputs},
    )


def stage_problem(config: TrainConfig, index: int, field: str, description: str) -> str:
    """Returns a line about a problem of a stage, from a violation of its run."""
    text = f"stage {index + 1} ({config.stages[index].algorithm}): {field}: {description}"
    return f"{text}; no agent is given ([agent])" if field == AGENT_INPUT and config.agent is None else text


def _policy(policy: PolicyConfig, *, continues: bool) -> training_run_pb2.PolicySpec:
    spec = training_run_pb2.PolicySpec(name=policy.name)
    if continues:
        return spec
    if policy.version:
        spec.version = policy.version
    elif policy.base:
        spec.base = policy.base
    elif policy.path:
        spec.path = policy.path
    elif policy.build:
        spec.build = policy.build
    return spec
