"""Runs verifiers' own evaluation, without Fulmen; run in an environment that has verifiers.

`python verifiers_native.py FOLDER URL`: the folder has `scripted.py` and `sums_taskset.py`, and a scripted model is at the URL. Prints
JSON: the agent and the tasks that Fulmen makes, what verifiers scores, and how malformed environments are refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.utils.loaders import load_environment

from fulmen.integrations.environments import EnvironmentInvalid
from fulmen.integrations.verifiers import convert

sys.path.insert(0, sys.argv[1])
from scripted import MODEL  # the folder is an argument

AT_ONCE = 8
CONFIG: dict[str, Any] = {"taskset": {"id": "sums-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
MALFORMED: list[dict[str, Any]] = [
    {"config": "no-such-taskset"},
    {"config": {"taskset": {"id": "sums-taskset"}, "agent": {"harnes": 1}}, "model": ""},
    {"config": "sums-taskset", "count": 0},
]


async def scores(url: str) -> list[dict[str, float]]:
    """Returns the rewards of each task, and their sum."""
    os.environ["SCRIPTED_KEY"] = "none"
    env = load_environment(SingleAgentEnvConfig.model_validate(CONFIG))
    client = vf.EvalClientConfig(base_url=url, api_key_var="SCRIPTED_KEY")
    limit = asyncio.Semaphore(AT_ONCE)

    async def score(task: Any) -> dict[str, float]:
        async with limit:
            episode = await env.run_episode(task, vf.ModelContext(model=MODEL, client=client))
        assert episode.ok, episode.errors
        [trace] = episode.traces
        named = {name: each.value for name, each in trace.rewards.items() if each is not None}
        return {"reward": trace.reward, **named, **trace.metrics}

    async with env.serving():
        return list(await asyncio.gather(*(score(task) for task in env.taskset)))


def refused() -> list[str]:
    """Returns the errors of malformed environments."""
    told = []
    for each in MALFORMED:
        try:
            convert(**{"model": MODEL, **each})
        except EnvironmentInvalid as error:
            told.append(str(error))
    return told


def main() -> None:
    """Prints the record."""
    made = convert("sums-taskset", model=MODEL)
    record = {"agent": made.agent.python, "tasks": made.tasks, "scores": asyncio.run(scores(sys.argv[2]))}
    print(json.dumps({**record, "refused": refused()}))


if __name__ == "__main__":
    main()
