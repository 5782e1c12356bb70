"""Environments of verifiers (Prime Intellect) as agents with tasks: an episode for each task of a taskset.

An attempt runs an episode as verifiers runs it, with its harness, tools and scoring; its model calls go through Fulmen's proxy with the
attempt's key. The reward is the sum of the weighted rewards, as in verifiers; each of them and each metric is a dimension.

Source: `load_environment` and `Env.run_episode` of verifiers 0.4, `verifiers/v1/`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fulmen.agent import FINAL_DIMENSION, Context
from fulmen.emit import emit_reward
from fulmen.integrations.environments import TASK, Environment, EnvironmentInvalid, agent_config, imported, wrapped

if TYPE_CHECKING:
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["EpisodeFailed", "convert", "play"]

TARGET = "fulmen.integrations.verifiers:play"
KEY_VARIABLE = "OPENAI_API_KEY"
_NOT_IN_DIMENSION = re.compile(r"[^a-z0-9_.-]+")


class EpisodeFailed(RuntimeError):
    """Verifiers reported errors of an episode; its rewards do not count."""


def convert(
    config: str | Mapping[str, Any],
    *,
    model: str,
    count: int = 50,
    sampling: Mapping[str, Any] | None = None,
    agent: AgentConfig | None = None,
) -> Environment:
    """Returns an environment as an agent with the first tasks of its taskset.

    Args:
        config: Id of an installed taskset, or a configuration in the form of the `[env]` table, such as `{"taskset": {"id":
            "gsm8k-v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}`. With only an id, the harness runs as a
            subprocess of the attempt.
        model: Name of the model that plays.
        count: Number of tasks, fewer if the taskset has fewer.
        sampling: Sampling settings of its calls, in the form of verifiers, such as `{"max_tokens": 512}`.
        agent: Further settings of the agent, such as `AgentConfig(requirements="requirements.txt")`.

    Raises:
        EnvironmentInvalid: With every problem: a taskset that is not installed, a configuration that verifiers refuses, no tasks.
    """
    imported("verifiers.v1", "verifiers")
    given = _configuration(config)
    problems = [] if model else ["model: it has no name"]
    if count < 1:
        problems.append(f"count: must be at least 1, not {count}")
    try:
        text = json.dumps({"config": given, "sampling": dict(sampling or {})}, sort_keys=True)
        found = len(list(_environment(json.dumps(given, sort_keys=True)).taskset.take(max(count, 1))))
        if not found:
            problems.append("taskset: it has no tasks")
    except Exception as error:  # noqa: BLE001  # Whatever a taskset raises when it is loaded.
        problems.append(f"it cannot be loaded: {type(error).__name__}: {error}")
    if problems:
        raise EnvironmentInvalid(f"The verifiers environment {_name(given)}", problems)
    description = {**json.loads(text), "model": model}
    tasks = tuple(wrapped({**description, "index": index}, number=index) for index in range(found))
    return Environment(agent=agent_config(TARGET, agent), tasks=tasks, model=model)


def _configuration(config: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, str):
        return dict(config)
    return {"taskset": {"id": config}, "agent": {"runtime": {"type": "subprocess"}}}


def _name(config: Mapping[str, Any]) -> str:
    taskset = config.get("taskset")
    return str(taskset.get("id", "?")) if isinstance(taskset, Mapping) else "?"


@lru_cache(maxsize=4)
def _environment(config: str) -> Any:
    """Returns the environment of a configuration, a JSON text; loaded once in a process."""
    vf, loaders = imported("verifiers.v1", "verifiers"), imported("verifiers.v1.utils.loaders", "verifiers")
    concrete_type = imported("verifiers.v1.utils.generic", "verifiers").concrete_type
    given = json.loads(config)
    kind = loaders.environment_class(_name(given), given.get("id", ""))
    settings = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    return loaders.load_environment(settings.model_validate(given))


async def play(task: Mapping[str, Any], context: Context) -> float:
    """Runs an episode; returns the sum of its weighted rewards. The agent that runners call.

    Raises:
        EpisodeFailed: If verifiers reports errors.
    """
    vf = imported("verifiers.v1", "verifiers")
    told = task[TASK]
    env = _environment(json.dumps(told["config"], sort_keys=True))
    wanted = next(iter(env.taskset.skip(told["index"])))
    model = vf.ModelContext(
        model=told["model"],
        client=vf.EvalClientConfig(base_url=context.openai_base_url, api_key_var=KEY_VARIABLE),
        sampling=vf.SamplingConfig.model_validate(told["sampling"]),
    )
    async with env.serving():
        episode = await env.run_episode(wanted, model)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "The episode failed.")
    return _scored(episode)


def _scored(episode: Any) -> float:
    """Emits the rewards and metrics of an episode; returns its reward: the sum over its traces."""
    total = 0.0
    for trace in episode.traces:
        total += trace.reward
        named = {name: each.value for name, each in trace.rewards.items() if each is not None}
        for name, value in {**trace.metrics, **named}.items():
            if value is not None and math.isfinite(value):
                emit_reward(float(value), dimension=_dimension(name), trace=False)
    return total


def _dimension(name: str) -> str:
    word = _NOT_IN_DIMENSION.sub("-", name.lower())[:60] or "reward"
    return f"{word}-own" if word == FINAL_DIMENSION else word
