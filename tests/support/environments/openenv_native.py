"""Plays by OpenEnv's own harness, without Fulmen; run in an environment that has openenv-core.

`python openenv_native.py FOLDER URL`: the folder has `scripted.py`, a server of `openenv_server.py` is at the URL. Prints JSON: the agent
and the tasks that Fulmen makes, the reward of each episode, and how malformed environments are refused.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult, StepEnvSessionAdapter
from openenv.core.llm_client import LLMResponse, ToolCall

from fulmen.integrations.environments import EnvironmentInvalid
from fulmen.integrations.openenv import convert

sys.path.insert(0, sys.argv[1])
from scripted import MODEL, choice  # the folder is an argument

ACT = Tool(name="guess", description="Guesses.", input_schema={"type": "object"})
MALFORMED: list[dict[str, Any]] = [
    {"url": "http://127.0.0.1:9"},
    {"action": "txt", "score": "mean"},
    {"resets": [], "observation": "seen"},
]


def model_step(messages: list[dict[str, Any]], *_: Any) -> ModelStepResult:
    """Guesses by the rule, from the last observation."""
    last = messages[-1]["content"]
    seen = last if messages[-1]["role"] == "user" else json.loads(last)["observation"]["said"]
    turn = sum(message["role"] == "assistant" for message in messages)
    call = ToolCall(id=str(turn), name="guess", args={"text": str(choice(seen, turn, 20))})
    return ModelStepResult(response=LLMResponse(content="", tool_calls=[call]))


def score(url: str, seed: int) -> float:
    """Runs an episode; returns its reward."""
    session = StepEnvSessionAdapter(
        client=GenericEnvClient(base_url=url).sync(),
        task=None,
        seed=seed,
        tool_specs=[ACT],
        action_builder=lambda _, arguments: arguments,
        initial_messages_builder=lambda result, _: [{"role": "user", "content": result.observation["said"]}],
    )
    done = MCPHarnessAdapter().run_white_box(model_step, session, HarnessRunLimits(max_turns=16))
    reward = session.verify(done.messages).env_reward
    session.close()
    assert reward is not None
    return float(reward)


def main() -> None:
    """Prints the record."""
    url = sys.argv[2]
    made = convert(url, model=MODEL, action="text", observation="said")
    refused = []
    for each in MALFORMED:
        try:
            convert(**{"url": url, "model": MODEL, **each})
        except EnvironmentInvalid as error:
            refused.append(str(error))
    scores = [score(url, seed) for seed in range(50)]
    print(json.dumps({"agent": made.agent.python, "tasks": made.tasks, "scores": scores, "refused": refused}))


if __name__ == "__main__":
    main()
