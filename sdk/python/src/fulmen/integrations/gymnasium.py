"""Gymnasium environments with text or discrete actions as agents with tasks: an episode for each seed.

The model sees each observation as a message of the user and answers with an action. The attempt's reward is the sum of the
episode's rewards; the reward of each step is recorded as the dimension `step_reward`.

Source: the API of gymnasium 1.x, https://gymnasium.farama.org/api/env/.
"""

from __future__ import annotations

import json
import re
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

TARGET = "fulmen.integrations.gymnasium:play"

_OBSERVED = ("Text", "Discrete", "Box", "MultiDiscrete", "MultiBinary", "Tuple", "Dict")
# Of no more digits than Python reads.
_INTEGER = re.compile(r"(?<!\d)-?\d{1,18}(?!\d)")


def convert(
    env_id: str,
    *,
    model: str,
    seeds: Sequence[int] = range(50),
    kwargs: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    instructions: str = "",
    max_steps: int | None = None,
    max_tokens: int = 64,
    agent: AgentConfig | None = None,
) -> Environment:
    """Returns an environment as an agent with a task for each seed.

    Args:
        env_id: Its id, such as `FrozenLake-v1`, or `my_module:Name-v0` for one that a module registers.
        model: Name of the model that plays.
        seeds: Seeds of `reset`, one episode each.
        kwargs: Arguments of the environment; JSON. With `{"render_mode": "ansi"}` the model sees what is rendered.
        actions: Names of discrete actions, in their order; the model answers with one of them or with its number.
        instructions: Instructions to the model; by default how to answer.
        max_steps: Steps after which an episode ends; None for the environment's own limit.
        max_tokens: Maximum length of an answer, in tokens.
        agent: Further settings of the agent, such as `AgentConfig(requirements="requirements.txt")`.

    Raises:
        EnvironmentInvalid: With every problem: an unknown id, unsupported spaces, arguments that JSON cannot represent.
    """
    gymnasium = imported("gymnasium", "gymnasium")
    description = {
        "id": env_id,
        "kwargs": dict(kwargs or {}),
        "actions": list(actions),
        "instructions": instructions,
        "max_steps": max_steps,
        "max_tokens": max_tokens,
        "model": model,
    }
    problems = [] if len(list(seeds)) else ["seeds: the list is empty"]
    if not model:
        problems.append("model: it has no name")
    problems += below_one(max_steps=max_steps, max_tokens=max_tokens)
    try:
        json.dumps(description)
    except (TypeError, ValueError) as error:
        problems.append(f"kwargs: {error}")
    problems += _problems(gymnasium, description, next(iter(seeds), 0))
    if problems:
        raise EnvironmentInvalid(f"The Gymnasium environment {env_id}", problems)
    tasks = tuple(wrapped({**description, "seed": int(seed)}, number=number) for number, seed in enumerate(seeds))
    return Environment(agent=agent_config(TARGET, agent), tasks=tasks, model=model)


def _problems(gymnasium: Any, description: Mapping[str, Any], seed: int) -> list[str]:
    """Returns the problems of an environment; makes and resets it once."""
    try:
        env = gymnasium.make(description["id"], **description["kwargs"])
    except Exception as error:  # noqa: BLE001  # Whatever the environment raises when it is made.
        return [f"it cannot be made: {type(error).__name__}: {error}"]
    try:
        found = _space_problems(env, description["actions"])
        env.reset(seed=int(seed))
    except Exception as error:  # noqa: BLE001  # Whatever the environment raises when it is reset.
        return [f"it cannot be reset with seed {seed}: {type(error).__name__}: {error}"]
    finally:
        env.close()
    return found


def _space_problems(env: Any, actions: Sequence[str]) -> list[str]:
    found = []
    kind, seen = type(env.action_space).__name__, type(env.observation_space).__name__
    if kind not in ("Discrete", "Text"):
        found.append(f"action_space: {kind} is neither Discrete nor Text; wrap the environment to make it one")
    elif kind == "Text" and actions:
        found.append("actions: an environment with a Text action space has no names of actions")
    elif actions and len(actions) != env.action_space.n:
        found.append(f"actions: there are {env.action_space.n} actions, and {len(actions)} names")
    if seen not in _OBSERVED and env.render_mode != "ansi":
        found.append(f"observation_space: {seen} has no form as text; give kwargs={{'render_mode': 'ansi'}}")
    return found


def play(task: Mapping[str, Any], context: Context) -> float:
    """Plays an episode; returns the sum of its rewards. The agent that runners call."""
    gymnasium = imported("gymnasium", "gymnasium")
    told = task[TASK]
    env = gymnasium.make(told["id"], **told["kwargs"])
    try:
        return _episode(env, told, context)
    finally:
        env.close()


def _episode(env: Any, told: Mapping[str, Any], context: Context) -> float:
    observation, _ = env.reset(seed=told["seed"])
    messages = [
        {"role": "system", "content": told["instructions"] or instructions_of(env, told["actions"])},
        {"role": "user", "content": shown(env, observation)},
    ]
    total, step, ended = 0.0, 0, False
    while not ended and (told["max_steps"] is None or step < told["max_steps"]):
        said = text_of(complete(context, told["model"], messages, max_tokens=told["max_tokens"]))
        action = action_of(env.action_space, said, told["actions"])
        if action is None:
            break
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), bool(terminated or truncated)
        if step < MAX_REWARDS - 1:
            emit_reward(float(reward), dimension="step_reward", step=step, trace=False)
        step += 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown(env, observation)}]
    return total


def instructions_of(env: Any, actions: Sequence[str]) -> str:
    """Returns the instructions on how to answer."""
    if type(env.action_space).__name__ == "Text":
        return "You act in an environment. Answer each observation with your action and nothing else."
    space = env.action_space
    names = actions or [str(number) for number in range(int(space.start), int(space.start) + int(space.n))]
    return (
        "You act in an environment. Answer each observation with one of these actions and nothing else: "
        + ", ".join(names)
    )


def shown(env: Any, observation: Any) -> str:
    """Returns an observation as text: the rendering in mode `ansi`, otherwise a text or JSON."""
    if env.render_mode == "ansi":
        return str(env.render())
    return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def action_of(space: Any, said: str, actions: Sequence[str]) -> Any:
    """Returns the action that an answer names, last if it names several; None if it names none that is in the space.

    Args:
        space: The action space, Discrete or Text.
        said: The answer.
        actions: Names of discrete actions, in their order.
    """
    text = said.strip()
    if type(space).__name__ == "Text":
        return text if space.contains(text) else None
    start = int(space.start)
    if actions:
        pattern = "|".join(re.escape(name) for name in sorted(actions, key=len, reverse=True))
        if named := re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE):
            lower = [name.lower() for name in actions]
            return start + lower.index(named[-1].lower())
    numbers = _INTEGER.findall(text)
    number = int(numbers[-1]) if numbers else start - 1
    return number if start <= number < start + int(space.n) else None
