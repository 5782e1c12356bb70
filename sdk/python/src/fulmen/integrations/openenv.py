"""OpenEnv's environments, which are servers, as agents with tasks: a session with the server for each episode.

The model sees each observation as a message of the user and answers with an action. The attempt's reward is the last reward of
the environment, as in OpenEnv's own harness, or the sum of all; each is recorded as the dimension `step_reward`.

Source: openenv-core 0.3: `openenv/core/generic_client.py` for sessions, `openenv/core/harness` for scores.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fulmen.agent import Context
from fulmen.emit import MAX_REWARDS, emit_reward
from fulmen.integrations.chat import complete, text_of
from fulmen.integrations.environments import (
    TASK,
    Environment,
    EnvironmentInvalid,
    agent_config,
    below_one,
    imported,
    wrapped,
)

if TYPE_CHECKING:
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["convert", "play"]

TARGET = "fulmen.integrations.openenv:play"
CONNECT_S = 10.0
SEEDS = tuple({"seed": number} for number in range(50))
"""Arguments of fifty resets."""

_SCORES = ("last", "sum")


def convert(
    url: str,
    *,
    model: str,
    resets: Sequence[Mapping[str, Any]] = SEEDS,
    action: str = "",
    observation: str = "",
    instructions: str = "",
    score: str = "last",
    max_steps: int = 16,
    max_tokens: int = 256,
    agent: AgentConfig | None = None,
) -> Environment:
    """Returns the environment of a server as an agent with a task for each episode.

    Args:
        url: Address of the server, as agents reach it: `http://host:port`.
        model: Name of the model that plays.
        resets: Arguments of `reset`, one episode each, such as its seed.
        action: Field of an action that the model's answer becomes; empty if the answer is the whole action, as JSON.
        observation: Field of an observation that the model sees; empty for all of it, as JSON.
        instructions: Instructions to the model; by default how to answer, with the schema of actions.
        score: `last`, the last reward of the environment, or `sum`.
        max_steps: Steps after which an episode ends.
        max_tokens: Maximum length of an answer, in tokens.
        agent: Further settings of the agent, such as `AgentConfig(requirements="requirements.txt")`.

    Raises:
        EnvironmentInvalid: With every problem: a server that does not answer, a field that actions or observations do not have.
    """
    imported("openenv.core", "openenv-core")
    problems = [] if model else ["model: it has no name"]
    problems += [] if resets else ["resets: the list is empty"]
    problems += below_one(max_steps=max_steps, max_tokens=max_tokens)
    if score not in _SCORES:
        problems.append(f"score: must be {' or '.join(_SCORES)}, not {score!r}")
    schema: Mapping[str, Any] = {}
    try:
        schema = _schema(url)
        problems += _field_problems(schema, action=action, observation=observation)
    except (OSError, ValueError) as error:
        problems.append(f"the server does not answer at {url}/schema: {type(error).__name__}: {error}")
    description = {
        "url": url,
        "action": action,
        "observation": observation,
        "instructions": instructions or _instructions(action, schema),
        "score": score,
        "max_steps": max_steps,
        "max_tokens": max_tokens,
        "model": model,
    }
    try:
        json.dumps([*map(dict, resets)])
    except (TypeError, ValueError) as error:
        problems.append(f"resets: {error}")
    if problems:
        raise EnvironmentInvalid(f"The OpenEnv server {url}", problems)
    tasks = tuple(wrapped({**description, "reset": dict(each)}, number=n) for n, each in enumerate(resets))
    return Environment(agent=agent_config(TARGET, agent), tasks=tasks, model=model)


def _schema(url: str) -> Mapping[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CONNECT_S) as answer:  # noqa: S310  # checked above
        found: Mapping[str, Any] = json.load(answer)
        return found


def _field_problems(schema: Mapping[str, Any], *, action: str, observation: str) -> list[str]:
    found = []
    for what, name in (("action", action), ("observation", observation)):
        known = schema.get(what, {}).get("properties", {})
        if name and name not in known:
            found.append(f"{what}: {what}s have no field {name!r}; they have {', '.join(sorted(known)) or 'none'}")
    needed = set(schema.get("action", {}).get("required", ())) - {action}
    if action and needed:
        found.append(
            f"action: actions need {', '.join(sorted(needed))} too; let the model answer with JSON (action='')"
        )
    return found


def _instructions(action: str, schema: Mapping[str, Any]) -> str:
    if action:
        return "You act in an environment. Answer each observation with your action and nothing else."
    return (
        "You act in an environment. Answer each observation with your action, a JSON object of this schema, and nothing "
        "else: " + json.dumps(schema.get("action", {}))
    )


def play(task: Mapping[str, Any], context: Context) -> float:
    """Plays an episode; returns its score. The agent that runners call.

    Raises:
        ConnectionError: If the server cannot be reached.
    """
    core = imported("openenv.core", "openenv-core")
    told = task[TASK]
    with core.GenericEnvClient(base_url=told["url"]).sync() as env:
        return _episode(env, told, context)


def _episode(env: Any, told: Mapping[str, Any], context: Context) -> float:
    result = env.reset(**told["reset"])
    messages = [
        {"role": "system", "content": told["instructions"]},
        {"role": "user", "content": _shown(result.observation, told["observation"])},
    ]
    rewards: list[float] = []
    for step in range(told["max_steps"]):
        if result.done:
            break
        said = text_of(complete(context, told["model"], messages, max_tokens=told["max_tokens"]))
        action = {told["action"]: said.strip()} if told["action"] else _object_in(said)
        if action is None:
            break
        result = env.step(action)
        if result.reward is not None:
            rewards.append(float(result.reward))
            if step < MAX_REWARDS - 1:
                emit_reward(rewards[-1], dimension="step_reward", step=step, trace=False)
        shown = _shown(result.observation, told["observation"])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    return sum(rewards) if told["score"] == "sum" else (rewards or [0.0])[-1]


def _shown(observation: Any, name: str) -> str:
    value = observation.get(name) if name and isinstance(observation, Mapping) else observation
    return value if isinstance(value, str) else json.dumps(value)


def _object_in(said: str) -> dict[str, Any] | None:
    """Returns the JSON object in an answer; None if there is none."""
    begin, end = said.find("{"), said.rfind("}")
    try:
        found = json.loads(said[begin : end + 1]) if begin >= 0 else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
