"""An environment as every integration converts it: an agent, its tasks and the model that it calls.

Invariant: everything that an attempt needs to know of its environment is in its task, so that the agent is a name of a module
(`fulmen.integrations.gymnasium:play`) and nothing is pickled.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["Environment", "EnvironmentInvalid", "agent_config", "below_one", "imported", "wrapped"]

TASK = "environment"
"""Key of a task with the description of its environment, for the agent."""


class EnvironmentInvalid(ValueError):
    """The environment cannot become an agent with tasks; the message has every problem. Nothing was created."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        """Keeps the problems."""
        super().__init__(f"{name} cannot be an agent's environment; nothing was created.\n" + "\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment as an agent with tasks.

    Attributes:
        agent: How the agent, and its grader if it has one, are run.
        tasks: One task for each episode.
        model: Name of the model that the agent calls: the policy that is trained, or a route of the proxy.
        folder: Folder whose files the agent needs; None for none.
    """

    agent: AgentConfig
    tasks: tuple[Mapping[str, Any], ...]
    model: str
    folder: Path | None = None

    def training(self) -> dict[str, Any]:
        """Returns the arguments of `client.train` that it provides: `agent`, `tasks`, `policy`, and `folder` if there is one."""
        found: dict[str, Any] = {"agent": self.agent, "tasks": list(self.tasks), "policy": self.model}
        return found if self.folder is None else {**found, "folder": self.folder}


def agent_config(target: str, given: AgentConfig | None) -> AgentConfig:
    """Returns the configuration of the agent `target`, with the given settings."""
    # Not at the top: agents' own environments have no protobuf.
    from fulmen.train_toml.agent import AgentConfig

    return replace(given or AgentConfig(), python=target)


def below_one(**counts: int | None) -> list[str]:
    """Returns the problems of counts that must be at least 1, by the name of their argument; None is the default."""
    return [
        f"{name}: must be at least 1, not {value}" for name, value in counts.items() if value is not None and value < 1
    ]


def imported(module: str, package: str) -> ModuleType:
    """Returns a library of an integration.

    Raises:
        EnvironmentInvalid: If it is not installed here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"{module} cannot be imported ({error}): pip install {package}, here and in the agent's environment"
        raise EnvironmentInvalid(package, [problem]) from None


def wrapped(description: Mapping[str, Any], *, number: int) -> dict[str, Any]:
    """Returns the task of an episode."""
    return {"id": f"episode-{number}", TASK: dict(description)}
