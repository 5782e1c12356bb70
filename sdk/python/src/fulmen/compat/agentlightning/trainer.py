"""`Trainer`: publishes an agent of Agent Lightning's and trains it on Fulmen's services.

What theirs wires together (store, runners, tracer, adapter, strategy) are services here, found as `fulmen.Client` finds them; a
`Trainer` takes these arguments and does not use them.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fulmen.agent
from fulmen.compat.agentlightning.algorithm import APO, VERL, Baseline, NotPorted
from fulmen.compat.agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from fulmen.compat.agentlightning.litagent import (
    ENGINE_VARIABLE,
    MODEL_VARIABLE,
    PROMPT_VARIABLE,
    WRAPPED_TASK,
    LitAgent,
)
from fulmen.compat.agentlightning.records import LLM, NamedResources, PromptTemplate

if TYPE_CHECKING:
    from fulmen.client.rollouts import Rollout
    from fulmen.client.sync.client import Client
    from fulmen.client.sync.runs import Run
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)

_SERVICES = (
    "adapter",
    "daemon",
    "hooks",
    "llm_proxy",
    "max_rollouts",
    "max_tasks",
    "n_runners",
    "n_workers",
    "port",
    "runner",
    "store",
    "strategy",
    "tracer",
    "triplet_exporter",
)
"""Arguments of Agent Lightning that services of Fulmen replace."""


class Trainer:
    """Trains agents. `fit` and `dev` are theirs; so are all arguments."""

    def __init__(
        self,
        *,
        dev: bool = False,
        algorithm: APO | VERL | Baseline | None = None,
        initial_resources: NamedResources | None = None,
        client: Client | None = None,
        **services: Any,
    ) -> None:
        """Keeps the algorithm and the first resources.

        Args:
            dev: Whether `fit` means `dev`, as in their version 0.2.
            algorithm: `APO`, `VERL` or `Baseline`.
            initial_resources: The first prompt, and for `dev` the model.
            client: A client of Fulmen; by default one that finds its services itself.
            services: Further arguments of theirs, which are not used.

        Raises:
            TypeError: If an argument is not theirs.
            NotPorted: If the algorithm is not one of the above.
        """
        if unknown := sorted(services.keys() - set(_SERVICES)):
            raise TypeError(f"Trainer has no argument {', '.join(unknown)}.")
        if not isinstance(algorithm, APO | VERL | Baseline | None):
            raise NotPorted(
                f"{type(algorithm).__name__} is an algorithm of Agent Lightning's store. Write it as a loop of "
                "fulmen.Client().trainer (docs/trainers.md), or as an algorithm of the service (docs/extending.md)."
            )
        self.algorithm = algorithm
        self.initial_resources = dict(initial_resources or {})
        self._client = client
        self._dev = dev

    def fit(self, agent: LitAgent[Any], train_dataset: Any = None, *, val_dataset: Any = None) -> Run | None:
        """Trains the agent; returns the run when it has ended, or None in a process whose role is `runner`.

        Args:
            agent: The agent.
            train_dataset: Training tasks.
            val_dataset: Validation tasks.

        Raises:
            RuntimeError: In an attempt: the program's `fit` is not behind `if __name__ == "__main__":`.
            ConfigError: With every problem that was found; nothing was created.
            RunFailed: If the run failed.
        """
        if self._dev or isinstance(self.algorithm, Baseline):
            self.dev(agent, train_dataset, val_dataset=val_dataset)
            return None
        if self.algorithm is None:
            raise ValueError("Trainer.fit needs an algorithm, such as VERL(config).")
        if self._has_nothing_to_do():
            return None
        tasks = _tasks(train_dataset)
        planned = self.algorithm.planned(len(tasks))
        if planned.left_out:
            _log.warning("Settings without a counterpart in Fulmen: %s", ", ".join(planned.left_out))
        name = _name_of(agent)
        with self._connected() as client, _agent_of(agent, self._environment(name)) as given, self._prompt() as prompt:
            run = client.train(
                algorithm=planned.algorithm,
                tasks=tasks,
                validation=_tasks(val_dataset) or None,
                base=planned.base or None,
                name=name,
                policy=name,
                **given,
                **prompt,
            )
            for step in run:
                _log.info("step %s: reward %s, validation %s", step.number, step.reward, step.validation)
            return run

    def dev(self, agent: LitAgent[Any], train_dataset: Any = None, *, val_dataset: Any = None) -> list[Rollout]:
        """Runs the agent once on each task, without training; logs rewards and returns the rollouts.

        The model, the name of a route of the proxy, and the prompt are taken from `initial_resources`.
        """
        if self._has_nothing_to_do():
            return []
        model = next((each.model for each in self.initial_resources.values() if isinstance(each, LLM)), "")
        name = _name_of(agent)
        with self._connected() as client, _agent_of(agent, self._environment(model)) as given:
            client.publish_agent(name, given["agent"], folder=given.get("folder"))
            made = [
                each
                for mode, tasks in (("train", train_dataset), ("validation", val_dataset))
                if (lines := _tasks(tasks))
                for each in client.rollouts.create(name, lines, mode=mode)
            ]
            done: list[Rollout] = client.rollouts.wait(made)
        for each in done:
            _log.info("%s: %s, reward %s", each.name, each.state, each.reward)
        return done

    def _has_nothing_to_do(self) -> bool:
        if fulmen.agent.current() is not None:
            raise RuntimeError(
                'A runner has imported this program: put Trainer.fit behind `if __name__ == "__main__":`.'
            )
        if resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE) != "runner":
            return False
        _log.info("Role runner: Fulmen's runners are services; nothing to do in this process.")
        return True

    @contextmanager
    def _connected(self) -> Iterator[Client]:
        if self._client is not None:
            yield self._client
            return
        from fulmen.client.sync.client import Client

        with Client() as client:
            yield client

    def _template(self) -> PromptTemplate | None:
        return next((each for each in self.initial_resources.values() if isinstance(each, PromptTemplate)), None)

    def _environment(self, model: str) -> dict[str, str]:
        template = self._template()
        first = {} if template is None else {ENGINE_VARIABLE: template.engine, PROMPT_VARIABLE: template.template}
        return {**({MODEL_VARIABLE: model} if model else {}), **first}

    @contextmanager
    def _prompt(self) -> Iterator[dict[str, str]]:
        template = self._template()
        if template is None:
            yield {}
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "prompt.md")
            path.write_text(template.template, encoding="utf-8")
            yield {"prompt": str(path)}


def _tasks(dataset: Any) -> list[Mapping[str, Any]]:
    """Returns tasks as JSON objects; those that are none are wrapped, and unwrapped by the agent."""
    if dataset is None:
        return []
    count = len(dataset)
    return [item if isinstance(item := dataset[index], Mapping) else {WRAPPED_TASK: item} for index in range(count)]


def _name_of(agent: LitAgent[Any]) -> str:
    word = getattr(agent, "__name__", type(agent).__name__)
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")[:32].strip("-") or "agent"


@contextmanager
def _agent_of(agent: LitAgent[Any], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the arguments `agent` and `folder` of `client.train`.

    An agent that is a name in a file is passed by that name, with the file's folder. Any other, such as a notebook's, is
    pickled.
    """
    from fulmen.train_toml.agent import AgentConfig
    from fulmen.training.functions import FILE, packed_functions

    if (place := _place_of(agent)) is not None:
        file, name = place
        config: AgentConfig = AgentConfig(python=f"{file.name}:{name}", environment=environment)
        yield {"agent": config, "folder": file.parent}
        return
    with tempfile.TemporaryDirectory() as made, packed_functions({"agent": agent}, None) as files:
        for name, path in files.items():
            target = Path(made, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        yield {"agent": AgentConfig(python=f"{FILE}:agent", environment=environment), "folder": made}


def _place_of(agent: LitAgent[Any]) -> tuple[Path, str] | None:
    """Returns the file and the name in it by which an agent is found; None for one of a notebook, or without a name."""
    modules = [sys.modules.get(str(getattr(agent, "__module__", ""))), sys.modules.get("__main__")]
    for module in modules:
        file = getattr(module, "__file__", None)
        if module is None or file is None or not file.endswith(".py"):
            continue
        for name, value in vars(module).items():
            if value is agent and inspect.getattr_static(module, name) is agent:
                return Path(file).resolve(), name
    return None
