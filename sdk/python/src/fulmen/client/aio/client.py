"""`fulmen.AsyncClient`: the services for asynchronous programs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Unpack

from fulmen.algorithm.v1 import trainer_service_pb2, training_run_pb2
from fulmen.client.aio.base import Session, listed
from fulmen.client.aio.calls import AsyncCalls
from fulmen.client.aio.proxy import AsyncBackends, AsyncRoutes
from fulmen.client.aio.resources import AsyncModels, AsyncPrompts, AsyncResources
from fulmen.client.aio.rollouts import AsyncRollouts
from fulmen.client.aio.runs import AsyncRun, AsyncRuns
from fulmen.client.aio.spans import AsyncSpans
from fulmen.client.aio.trainers import AsyncTrainer, AsyncTrainers, adam_settings, sent
from fulmen.client.project import QueueStats, Usage
from fulmen.client.resources import Resource
from fulmen.client.trainers import Lora
from fulmen.client.view import Named, name_of
from fulmen.connection import Deployment, find_local_stack
from fulmen.ids import uuid7
from fulmen.messages import enum_number, timestamp
from fulmen.rpc.channel import Token, open_channel
from fulmen.rpc.home import HomeChannel
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_service_pb2, usage_service_pb2
from fulmen.training.algorithm import Algorithm
from fulmen.training.given import (
    Agent,
    Base,
    Reward,
    TrainOptions,
    given_policy,
    given_training,
    publish_given_agent,
)
from fulmen.training.tasks import Tasks

__all__ = ["AsyncClient"]


class AsyncClient:
    """A client of the services of a deployment or of the local stack. It can be used from any event loop.

    It connects at its first call and reconnects automatically. Its calls raise the classes of `fulmen.errors`.

    >>> import fulmen
    >>> async with fulmen.AsyncClient() as client:
    ...     stats = await client.queue()
    >>> stats.running_count
    0
    """

    def __init__(
        self,
        *,
        store: str = "",
        algorithm: str = "",
        llm_proxy: str = "",
        token: str = "",
        state_dir: str | PathLike[str] | None = None,
    ) -> None:
        """Finds the services: from the arguments, then from the environment, then from the stack of a directory.

        Args:
            store: address of the store, `host:port`; by default FULMEN_STORE_TARGET.
            algorithm: address of the algorithm service; by default FULMEN_ALGORITHM_TARGET.
            llm_proxy: address of the LLM proxy's gRPC port; by default FULMEN_LLM_PROXY_TARGET.
            token: API token; by default FULMEN_TOKEN, then the stack's own. FULMEN_TLS_CA_FILE and related variables
                configure the connections to named services.
            state_dir: state directory of the local stack, for services that are not named; by default
                FULMEN_STATE_DIR, then .fulmen. If it is given, addresses and token in the environment are ignored.

        Raises:
            LocalStackMissing: if no service is named and no stack is running.
            OSError: if a file for TLS cannot be read.
        """
        given = {"store": store, "algorithm": algorithm, "llm_proxy": llm_proxy, "token": token}
        deployment = Deployment.found(given, None if state_dir is None else Path(state_dir))
        targets, tls = deployment.targets(), deployment.tls()
        has_own_token = deployment.token or deployment.names_services
        # That of a stack is renewed.
        bearer: Token = deployment.bearer() if has_own_token else find_local_stack(deployment.state_dir).token
        self._channels = {
            name: HomeChannel(partial(open_channel, getattr(targets, name), token=bearer, tls=tls))
            for name in ("store", "algorithm", "llm_proxy")
        }
        self._session = Session(services=Services.over(**self._channels), project=deployment.project)

    async def __aenter__(self) -> AsyncClient:
        """Returns the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Closes the connections."""
        await self.close()

    def __repr__(self) -> str:
        """Shows the project."""
        return f"{type(self).__name__}(project={self.project!r})"

    @property
    def project(self) -> str:
        """The project in which short names are looked up: the token's, or `projects/default`."""
        return self._session.project

    @property
    def services(self) -> Services:
        """The generated stubs of all services, for rpcs without a method here."""
        return self._session.services

    @property
    def rollouts(self) -> AsyncRollouts:
        """The queue of rollouts."""
        return AsyncRollouts(self._session)

    @property
    def spans(self) -> AsyncSpans:
        """Spans and traces of rollouts."""
        return AsyncSpans(self._session)

    @property
    def calls(self) -> AsyncCalls:
        """Recorded calls of an app."""
        return AsyncCalls(self._session)

    @property
    def resources(self) -> AsyncResources:
        """Versioned resources."""
        return AsyncResources(self._session)

    @property
    def prompts(self) -> AsyncPrompts:
        """Prompts."""
        return AsyncPrompts(self._session)

    @property
    def models(self) -> AsyncModels:
        """Versions of policies."""
        return AsyncModels(self._session)

    @property
    def runs(self) -> AsyncRuns:
        """Training runs."""
        return AsyncRuns(self._session)

    @property
    def trainers(self) -> AsyncTrainers:
        """Trainers for your own training loops."""
        return AsyncTrainers(self._session)

    @property
    def routes(self) -> AsyncRoutes:
        """Routes of the LLM proxy."""
        return AsyncRoutes(self._session)

    @property
    def backends(self) -> AsyncBackends:
        """Backends of the LLM proxy."""
        return AsyncBackends(self._session)

    async def publish_agent(
        self, name: str, agent: Agent, *, reward: Reward = None, folder: str | PathLike[str] | None = None
    ) -> Resource:
        """Publishes an agent, so that rollouts of it can be created; an unchanged agent keeps its version.

        >>> def solve(task):
        ...     return task["input"]
        >>> def grade(task, outcome):
        ...     return 1.0 if outcome else 0.0
        >>> await client.publish_agent("echo", solve, reward=grade)
        Resource(name='resources/agent.echo/versions/1', kind='agent')

        Args:
            name: name of the agent, at most 32 characters of [a-z0-9-].
            agent: as in `train`.
            reward: as in `train`.
            folder: as in `train`.

        Raises:
            ConfigError: with every problem that was found.
            ExtraMissing: if a library that an argument needs is not installed.
        """
        version = await publish_given_agent(self.services, name, agent, reward=reward, folder=folder)
        return await self.resources.get(version)

    async def queue(self, *, run: str | Named | None = None) -> QueueStats:
        """Returns how many rollouts are queued and running, in the project or in one training run.

        >>> (await client.queue()).runner_count
        1
        """
        request = rollout_service_pb2.GetQueueStatsRequest(project=self.project, training_run=self._session.run(run))
        return QueueStats(await self.services.rollouts.GetQueueStats(request))

    async def pause_queue(self, reason: str = "") -> None:
        """Pauses the project's queue: within one second no more rollouts are assigned to runners; running ones
        continue.

        >>> await client.pause_queue("the model server is replaced")
        >>> (await client.queue()).pause_reason
        'the model server is replaced'
        >>> await client.resume_queue()
        True

        Args:
            reason: the reason, for people who look at the queue; at most 256 characters.
        """
        await self.services.rollouts.PauseQueue(
            rollout_service_pb2.PauseQueueRequest(project=self.project, reason=reason)
        )

    async def resume_queue(self) -> bool:
        """Resumes the project's queue; returns whether it was paused."""
        request = rollout_service_pb2.ResumeQueueRequest(project=self.project)
        return bool((await self.services.rollouts.ResumeQueue(request)).was_paused)

    async def usage(
        self,
        *,
        by: str = "model",
        run: str | Named | None = None,
        rollout: str | Named | None = None,
        since: datetime.datetime | None = None,
    ) -> list[Usage]:
        """Returns the tokens and the cost of model calls.

        >>> await client.usage(by="model")
        []

        Args:
            by: `model`, `backend`, `training_run`, `rollout` or `attempt`; empty for the sum.
            run: only this training run.
            rollout: only this rollout.
            since: only calls since this time; without a zone, local time.
        """
        request = usage_service_pb2.GetUsageRequest(
            project=self.project,
            training_run=self._session.run(run),
            rollout=self._session.rollout(rollout) if rollout else "",
            start_time=timestamp(since) if since is not None else None,
            group_by=enum_number(usage_service_pb2.UsageGrouping, by) if by else None,
        )
        return [Usage(each) async for each in listed(self.services.usage.GetUsage, request, "groups")]

    async def train(
        self,
        *,
        agent: Agent | None = None,
        algorithm: Algorithm | str | Sequence[Algorithm | str],
        reward: Reward = None,
        tasks: Tasks | None = None,
        validation: Tasks | None = None,
        base: Base = None,
        **options: Unpack[TrainOptions],
    ) -> AsyncRun:
        """Publishes an agent and its tasks and creates a training run; returns the run immediately, with several stages
        the last one.

        Everything is checked first: if there are problems, all of them are reported and nothing is created.

        Args:
            agent: a function, a path such as "agent.py:solve", a command such as ["node", "agent.js"], or an
                `AgentConfig`. The agent names the policy as its model. None if no agent runs, as for `sft`.
            algorithm: such as `fulmen.GRPO(steps=40, group_size=8)`, or the name of one; several for stages that follow each other.
            reward: the grader: a function of task and outcome, a path, a command, or a `JudgeConfig`; None if the
                agent reports its rewards itself.
            tasks: tasks to train on: dicts, a `pandas.DataFrame`, a `datasets.Dataset`, or a path of JSON lines, CSV
                or Parquet.
            validation: tasks to validate on, in the same forms.
            base: the first weights: a folder that the algorithm service can read, an uploaded model "model:name", a policy, a version, record or run
                of one, or a function that builds them, called as `base(output_directory, seed=...)`. None for the
                newest version of the policy.
            options: see `TrainOptions`.

        Raises:
            ConfigError: with every problem that was found.
            ExtraMissing: if a library that an argument needs is not installed.
            ResourceNotFound: if `base` is neither a folder nor a policy.
        """
        given = {
            "agent": agent,
            "algorithm": algorithm,
            "reward": reward,
            "tasks": tasks,
            "validation": validation,
            "base": base,
        }
        training = await given_training(self.services, self.project, given, options)
        await training.begin()
        created = await training.create()
        return await self.runs.get(created.stages[-1]) if created.stages else AsyncRun(self._session, created)

    async def trainer(
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
    ) -> AsyncTrainer:
        """Creates a trainer for your own training loop, and loads its weights, which stay on the algorithm service.

        Args:
            base: the first weights: "hf:org/name", an uploaded model "model:name", a folder of the service's machine, a policy, or
                a version of one. None for the newest version of `policy`.
            policy: name of the policy that it publishes; by default the policy of `base`.
            lora: adapters to train instead of all weights; trainers with adapters on the same base share one copy of
                it in memory.
            learning_rate: default for `optim_step`, as are the following settings.
            betas: decays of the first and the second moment; by default 0.9 and 0.95.
            epsilon: added to the root of the second moment; by default 1e-8.
            weight_decay: decoupled weight decay of matrices; by default 0.
            max_grad_norm: norm to which a larger gradient is scaled down, 0 for no limit; by default 1.
            seed: seed of everything random in training.
            autosave_steps: optimizer steps between automatic saves, 0 for none; by default 1 with `lora`, and 0 without.
            checkpoint: checkpoint of a trainer to start from, instead of `base` and `lora`.
            timeout_s: limit of each call, in seconds, including all waits.

        Raises:
            SettingsInvalid: with every problem.
            ResourceNotFound: if `base` is neither a folder nor a policy.
            QuotaExceeded: if the project has too many trainers.
        """
        named = name_of(checkpoint) if checkpoint else ""
        spec = training_run_pb2.PolicySpec(name=policy)
        if not named:
            spec = await given_policy(self.services, self.project, policy, base)
        request = trainer_service_pb2.CreateTrainerRequest(
            project=self.project,
            policy=spec,
            lora=None if lora is None else lora.message(),
            adam=adam_settings(learning_rate, betas, epsilon, weight_decay, max_grad_norm),
            seed=seed,
            autosave_steps=autosave_steps,
            checkpoint=named,
            request_id=str(uuid7()),
        )
        created = await sent(self.services.trainers.CreateTrainer, request, timeout_s)
        return AsyncTrainer(self._session, created.trainer, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes the connections; calls in flight end with Unavailable."""
        for channel in self._channels.values():
            await channel.close()
