"""`fulmen.Client`: the services for scripts and notebooks. Made by tools/sync_client.py of `fulmen.client.aio.client`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Unpack

from fulmen.client.aio.client import AsyncClient
from fulmen.client.face import Face, faced
from fulmen.client.project import QueueStats, Usage
from fulmen.client.resources import Resource
from fulmen.client.sync.calls import Calls
from fulmen.client.sync.proxy import Backends, Routes
from fulmen.client.sync.resources import Models, Prompts, Resources
from fulmen.client.sync.rollouts import Rollouts
from fulmen.client.sync.runs import Run, Runs
from fulmen.client.sync.spans import Spans
from fulmen.client.sync.trainers import Trainer, Trainers
from fulmen.client.trainers import Lora
from fulmen.client.view import Named
from fulmen.rpc.services import Services
from fulmen.training.algorithm import Algorithm
from fulmen.training.given import Agent, Base, Reward, TrainOptions
from fulmen.training.tasks import Tasks

__all__ = ["Client"]


class Client(Face):
    """The services of a deployment, or of the stack of this machine; for scripts and notebooks.

    It connects at its first call, and reconnects by itself. All its calls raise the classes of `fulmen.errors`.

    >>> import fulmen
    >>> with fulmen.Client() as client:
    ...     stats = client.queue()
    >>> stats.running_count
    0
    """

    _wraps = AsyncClient
    _aio: AsyncClient

    def __init__(
        self,
        *,
        store: str = "",
        algorithm: str = "",
        llm_proxy: str = "",
        token: str = "",
        state_dir: str | PathLike[str] | None = None,
    ) -> None:
        """Finds the services: those that are given, then those of the environment, then the stack of a directory.

        Args:
            store: address of the store, `host:port`; by default FULMEN_STORE_TARGET.
            algorithm: address of the algorithm service; by default FULMEN_ALGORITHM_TARGET.
            llm_proxy: address of the LLM proxy's gRPC port; by default FULMEN_LLM_PROXY_TARGET.
            token: API token; by default FULMEN_TOKEN, then the stack's own. FULMEN_TLS_CA_FILE and related
                variables say how to connect to services that are named.
            state_dir: state directory of the stack, for what is not named; by default FULMEN_STATE_DIR, then .fulmen.
                If it is given, the environment's addresses and token do not count.

        Raises:
            LocalStackMissing: if no service is named and no stack is running.
            OSError: if a file for TLS cannot be read.
        """
        super().__init__(
            AsyncClient(store=store, algorithm=algorithm, llm_proxy=llm_proxy, token=token, state_dir=state_dir)
        )

    def __enter__(self) -> Client:
        """Returns the client."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the connections."""
        self.close()

    def __repr__(self) -> str:
        """Shows the project."""
        return self._aio.__repr__().removeprefix("Async")

    @property
    def project(self) -> str:
        """The project in which short names are looked up: the token's, or `projects/default`."""
        return self._aio.project

    @property
    def services(self) -> Services:
        """The generated stubs of all services, for what has no method here."""
        return self._aio.services

    @property
    def rollouts(self) -> Rollouts:
        """The queue of rollouts."""
        return faced(self._aio.rollouts)

    @property
    def spans(self) -> Spans:
        """Spans and traces of rollouts."""
        return faced(self._aio.spans)

    @property
    def calls(self) -> Calls:
        """Recorded calls of an app."""
        return faced(self._aio.calls)

    @property
    def resources(self) -> Resources:
        """Versioned resources."""
        return faced(self._aio.resources)

    @property
    def prompts(self) -> Prompts:
        """Prompts."""
        return faced(self._aio.prompts)

    @property
    def models(self) -> Models:
        """Versions of policies."""
        return faced(self._aio.models)

    @property
    def runs(self) -> Runs:
        """Training runs."""
        return faced(self._aio.runs)

    @property
    def trainers(self) -> Trainers:
        """Trainers of loops of your own."""
        return faced(self._aio.trainers)

    @property
    def routes(self) -> Routes:
        """Routes of the LLM proxy."""
        return faced(self._aio.routes)

    @property
    def backends(self) -> Backends:
        """Backends of the LLM proxy."""
        return faced(self._aio.backends)

    def publish_agent(
        self, name: str, agent: Agent, *, reward: Reward = None, folder: str | PathLike[str] | None = None
    ) -> Resource:
        """Publishes an agent, so that rollouts can be created of it; the same one keeps its version.

        >>> def solve(task):
        ...     return task["input"]
        >>> def grade(task, outcome):
        ...     return 1.0 if outcome else 0.0
        >>> client.publish_agent("echo", solve, reward=grade)
        Resource(name='resources/agent.echo/versions/1', kind='agent')

        Args:
            name: name of the agent, at most 32 characters of [a-z0-9-].
            agent: as in `train`.
            reward: as in `train`.
            folder: as in `train`.

        Raises:
            ConfigError: with every problem that was found.
            ExtraMissing: if a library is not installed that an argument needs.
        """
        return self._call(self._aio.publish_agent(name, agent, reward=reward, folder=folder))

    def queue(self, *, run: str | Named | None = None) -> QueueStats:
        """Returns how many rollouts wait and run, in the project or in one training run.

        >>> (client.queue()).runner_count
        1
        """
        return self._call(self._aio.queue(run=run))

    def pause_queue(self, reason: str = "") -> None:
        """Pauses the project's queue: from one second later no rollout is handed to a runner; those that run continue.

        >>> client.pause_queue("the model server is replaced")
        >>> (client.queue()).pause_reason
        'the model server is replaced'
        >>> client.resume_queue()
        True

        Args:
            reason: why, for those who look at the queue; at most 256 characters.
        """
        self._call(self._aio.pause_queue(reason))

    def resume_queue(self) -> bool:
        """Resumes the project's queue; returns whether it was paused."""
        return self._call(self._aio.resume_queue())

    def usage(
        self,
        *,
        by: str = "model",
        run: str | Named | None = None,
        rollout: str | Named | None = None,
        since: datetime.datetime | None = None,
    ) -> list[Usage]:
        """Returns the tokens and the cost of model calls.

        >>> client.usage(by="model")
        []

        Args:
            by: `model`, `backend`, `training_run`, `rollout` or `attempt`; empty for the sum.
            run: only this training run.
            rollout: only this rollout.
            since: only calls since then.
        """
        return self._call(self._aio.usage(by=by, run=run, rollout=rollout, since=since))

    def train(
        self,
        *,
        agent: Agent | None = None,
        algorithm: Algorithm | str | Sequence[Algorithm | str],
        reward: Reward = None,
        tasks: Tasks | None = None,
        validation: Tasks | None = None,
        base: Base = None,
        **options: Unpack[TrainOptions],
    ) -> Run:
        """Publishes an agent and its tasks, and creates the training run; returns it at once, of several stages the last.

        Everything is checked first: if there are problems, all of them are reported and nothing is created.

        Args:
            agent: a function, a path such as "agent.py:solve", a command such as ["node", "agent.js"], or an
                `AgentConfig`. The agent names the policy as its model. None where none runs, as in `sft` alone.
            algorithm: such as `fulmen.GRPO(steps=40, group_size=8)`, or the name of one; several for stages that follow each other.
            reward: the grader: a function of task and outcome, a path, a command, or a `JudgeConfig`; None if the
                agent reports its rewards itself.
            tasks: what to train on: tasks as dicts, a `pandas.DataFrame`, a `datasets.Dataset`, or a path of JSON
                lines, CSV or Parquet.
            validation: what to validate on, likewise.
            base: the first weights: a folder that the algorithm service can read, an uploaded model "model:name", a policy, a version, record or run
                of one, or a function that builds them, called as `base(output_directory, seed=...)`. None for the
                newest version of the policy.
            options: see `TrainOptions`.

        Raises:
            ConfigError: with every problem that was found.
            ExtraMissing: if a library is not installed that an argument needs.
            ResourceNotFound: if `base` is neither a folder nor a policy.
        """
        return self._call(
            self._aio.train(
                agent=agent,
                algorithm=algorithm,
                reward=reward,
                tasks=tasks,
                validation=validation,
                base=base,
                **options,
            )
        )

    def trainer(
        self,
        base: str | PathLike[str] | Named | None = None,
        *,
        policy: str = "",
        lora: Lora | None = None,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        epsilon: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        autosave_steps: int | None = None,
        checkpoint: str | Named = "",
        timeout_s: float = 600.0,
    ) -> Trainer:
        """Creates a trainer for a loop of your own, and loads its weights, which stay on the algorithm service.

        Args:
            base: the first weights: "hf:org/name", an uploaded model "model:name", a folder of the service's machine, a policy, or
                a version of one. None for the newest version of `policy`.
            policy: name of the policy that it publishes; by default that of `base`.
            lora: adapters to train instead of all weights; trainers with adapters on the same base share its memory.
            learning_rate: for `optim_step` calls that name none, like the following.
            betas: decays of the first and the second moment; by default 0.9 and 0.95.
            epsilon: added to the root of the second moment; by default 1e-8.
            weight_decay: decoupled weight decay of matrices; by default 0.
            max_grad_norm: norm to which a larger gradient is scaled down, 0 for no limit; by default 1.
            seed: seed of everything random in training.
            autosave_steps: optimizer steps between automatic saves, 0 for none; by default 1 with `lora`, and 0 without.
            checkpoint: checkpoint of a trainer to begin with, instead of `base` and `lora`.
            timeout_s: limit of each call, in seconds, with all waits.

        Raises:
            SettingsInvalid: with every problem.
            ResourceNotFound: if `base` is neither a folder nor a policy.
            QuotaExceeded: if the project has too many trainers.
        """
        return self._call(
            self._aio.trainer(
                base,
                policy=policy,
                lora=lora,
                learning_rate=learning_rate,
                betas=betas,
                epsilon=epsilon,
                weight_decay=weight_decay,
                max_grad_norm=max_grad_norm,
                seed=seed,
                autosave_steps=autosave_steps,
                checkpoint=checkpoint,
                timeout_s=timeout_s,
            )
        )

    def close(self) -> None:
        """Closes the connections; calls in flight end with Unavailable."""
        self._call(self._aio.close())

    @property
    def aio(self) -> AsyncClient:
        """The same, asynchronous, over the same connection."""
        return self._aio
