"""The connections of runs to the store, the LLM proxy, the engines and the trainers."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from fulmen.rpc.channel import FulmenChannel
from fulmen.rpc.tls import TlsFiles
from fulmen_algorithm.clients.chat import ChatClient
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.model_builder import BuildLimits, ModelBuilder
from fulmen_algorithm.clients.patience import Notify, Patience
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_algorithm.clients.store import RolloutRequest, StoreQueue, StoreResources
from fulmen_algorithm.cluster.clusters import of_run
from fulmen_algorithm.cluster.gpus.runs import RunGpus, Served
from fulmen_algorithm.cluster.joined import JoinedCluster
from fulmen_algorithm.cluster.port import Cluster, ClusterFailed, GroupOrder, PlacementRefused
from fulmen_algorithm.engines.on_clusters import engines_plan, is_on_cluster
from fulmen_algorithm.engines.pool import EnginePool, RunServing
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.engine_settings import StartedEngine
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RunSettings
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.runs.ports import EngineCount, GpuPlan, RunFence
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.trainers.elastic import ElasticTrainer, ranks_with_room
from fulmen_algorithm.trainers.processes import GroupOptions, group_order
from fulmen_algorithm.trainers.rank_group import MODULE, RankGroupTrainer, wishes_of
from fulmen_algorithm.training.compute import THIS_MACHINE, ComputeSettings, shown_gpus
from fulmen_exchange.links.settings import ServerAccess
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation

if TYPE_CHECKING:
    from fulmen_algorithm.trainers.in_process import TorchThread

PLAN_DEADLINE_S = 30.0
"""Time for a cluster to report its resources, for a plan that no one waits for: Ray starts a driver."""


class ServiceConnections:
    """See `runs.execution.Connections`.

    Attributes:
        isolator: Isolates the code of clients.
    """

    def __init__(
        self,
        settings: AlgorithmServiceSettings,
        *,
        store: FulmenChannel,
        proxy: FulmenChannel,
        engines: EnginePool,
        rank_tokens: RankTokens,
        clusters: Mapping[str, Cluster],
        modules: ModuleStarter,
        gpus: RunGpus,
    ) -> None:
        self._settings = settings
        self._gpus = gpus
        self._clusters = clusters
        self._store = store
        self._proxy = proxy
        self._engines = engines
        self._rank_tokens = rank_tokens
        limits = BuildLimits(
            deadline_s=settings.build_deadline_s,
            memory_bytes=settings.build_memory_bytes,
            disk_bytes=settings.build_disk_bytes,
            torch_threads=settings.torch_threads,
        )
        self.isolator = _isolator(settings)
        self._builder = ModelBuilder(
            self.isolator, limits, folder=_build_folder(settings), modules=modules if settings.warm_start else None
        )
        self._torch_thread: TorchThread | None = None

    def queue(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, fence: RunFence) -> StoreQueue:
        """Returns the queue and feed of a run, under an epoch of its lease."""
        limits = settings.rollout_limits
        request = RolloutRequest(
            project=run.project,
            training_run=run.name,
            agent=run.inputs.get("agent", ""),
            attempt_timeout_s=limits.timeout_s,
            max_attempts=limits.attempts,
            restart_lost=limits.restart_lost,
            fence=fence,
            resource_versions={use: run.inputs[use] for use in ("prompt",) if use in run.inputs},
        )
        return StoreQueue(self._store, request, self._patience(notify))

    def resources(self, project: str, notify: Notify, *, fence: RunFence | None = None) -> StoreResources:
        """Returns the resources of a project; with a fence, those of a run under an epoch of its lease."""
        return StoreResources(self._store, project, self._patience(notify), fence=fence)

    def resources_of(self, project: str) -> StoreResources:
        """Returns the resources of a project, for uses outside runs, which report no outages."""
        return self.resources(project, lambda severity, message: None)

    def serving(self, run: TrainingRun, settings: RunSettings, notify: Notify) -> RunServing:
        """Returns the engine and the route of a run's policy."""
        return self._engines.serving(run.name, run.project, settings.engine, notify)

    def engines(self, run: TrainingRun) -> EngineCount:
        """Returns how many engines a run has in this service."""
        return self._engines.engines_of(run.name)

    def hand_over(self, run: TrainingRun) -> None:
        """Leaves the policy of a run to another service, which runs it now."""
        self._engines.hand_over(run.policy.name)

    def chat(self, project: str, notify: Notify) -> ChatClient:
        """Returns the models that algorithms call for a project."""
        return ChatClient(
            self._proxy,
            project=project,
            endpoints=by_address(self._settings.chat_endpoints),
            outage_limit_s=self._settings.outage_limit_s,
            notify=notify,
        )

    async def open_trainer(self, setup: TrainerSetup, notify: Notify) -> Trainer:
        """Opens a trainer in this process, or in a group of ranks.

        Raises:
            RunFailed: if the folder holds no model with tokenizer, or a file of authorities cannot be read.
            TrainerLost: if the ranks do not start.
        """
        settings = self._settings
        if setup.exchange is not None and setup.exchange.link.targets:
            file = await self._rank_tokens.file_of(setup.project) if settings.token.get_secret_value() else None
            setup = replace(setup, server_access=await asyncio.to_thread(self._server_access, setup, file))
        if setup.compute.parallel.kind != "none":
            options = self._group_options(setup.compute, setup.training_run, notify)
            if setup.compute.parallel.is_elastic:
                return await ElasticTrainer.open(setup, options, notify=notify)
            return await RankGroupTrainer.open(setup, options)
        # torch is loaded when the first trainer is opened; that takes seconds.
        in_process = await asyncio.to_thread(import_module, "fulmen_algorithm.trainers.in_process")
        if self._torch_thread is None:
            self._torch_thread = in_process.TorchThread(torch_threads=settings.torch_threads)
        opening = in_process.InProcessTrainer.open(setup, thread=self._torch_thread, device=settings.device)
        trainer: Trainer = await opening
        return trainer

    async def placed(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, trains: bool) -> RunSettings:
        """See `runs.execution.Connections`."""
        own, idle = self._engines.served_besides(run.policy.name)
        try:
            on_gpus = await self._gpus.place(run.name, settings, trains=trains, served=Served(own=own, idle=idle))
        except PlacementRefused as error:
            raise RunFailed(f"The run does not fit the GPUs of this machine: {error}.") from error
        await self._engines.make_room(on_gpus.crowded)
        for severity, text in (("info", on_gpus.text), ("warning", on_gpus.sharing)):
            if text:
                notify(severity, text)
        refused: list[str] = []
        for name in _clusters_of(settings, trains=trains):
            if refused and isinstance(self._cluster(name), JoinedCluster):
                continue  # it would wait for machines
            orders = await self._orders_of(name, run.name, settings, trains=trains)
            try:
                notify("info", await self._plan(name, orders, of_run(self._cluster(name), run.name, notify)))
            except RunFailed as error:
                refused.append(error.message)
        if refused:
            raise RunFailed(" ".join(refused))
        return on_gpus.settings

    async def cluster_plan(self, settings: RunSettings, trains: bool) -> GpuPlan:
        """Plans a run on the clusters that it names, with the resources that they report; notes clusters that do not
        report them.

        Machines that join do so for one run, after it was created, so there are none to ask.
        """
        texts: list[str] = []
        problems: list[str] = []
        for name in [each for each in _clusters_of(settings, trains=trains) if each != THIS_MACHINE]:
            if isinstance(self._clusters.get(name), JoinedCluster):
                texts.append(
                    f"Machines of cluster {name!r} join a run once it is created, so placement was not planned."
                )
                continue
            try:
                async with asyncio.timeout(PLAN_DEADLINE_S):
                    orders = await self._orders_of(name, "", settings, trains=trains)
                    texts.append(await self._plan(name, orders, self._cluster(name)))
            except RunFailed as error:
                problems.append(error.message)
            except TrainerLost as error:
                texts.append(f"Placement on cluster {name!r} was not planned: {error.message}")
            except TimeoutError:
                texts.append(f"Placement on cluster {name!r} was not planned: no answer within {PLAN_DEADLINE_S:g} s.")
        return GpuPlan(text=" ".join(texts), problems=problems)

    def leave(self, run: TrainingRun) -> None:
        """See `runs.execution.Connections`."""
        self._gpus.release(run.name)

    async def _orders_of(
        self, cluster: str, training_run: str, settings: RunSettings, *, trains: bool
    ) -> Mapping[str, GroupOrder]:
        """Returns what a run asks of a cluster: its ranks, its engines.

        Raises:
            RunFailed: if the operator has none of this name.
            TrainerLost: if it does not answer.
        """
        asked: dict[str, GroupOrder] = {}
        if cluster == _ranks_cluster(settings, trains=trains):
            assert isinstance(settings, AlgorithmSettings)
            options, compute = self._group_options(settings.compute, training_run), settings.compute
            ranks = await self._room(cluster, compute, options)
            asked["ranks"] = group_order(MODULE, ranks, options, wishes_of(compute, options))
        engine = settings.engine
        if isinstance(engine, StartedEngine) and is_on_cluster(engine) and engine.cluster == cluster:
            asked["engines"] = engines_plan(engine, self._settings.device)
        return asked

    async def _room(self, cluster: str, compute: ComputeSettings, options: GroupOptions) -> int:
        """Returns the number of ranks to plan with.

        Raises:
            TrainerLost: if the cluster does not answer.
        """
        try:
            return await ranks_with_room(compute, options)
        except ClusterFailed as error:
            raise TrainerLost(f"Cluster {cluster!r} does not answer: {error}.") from error

    async def _plan(self, name: str, orders: Mapping[str, GroupOrder], cluster: Cluster) -> str:
        """Plans where the processes of a run will be on a cluster; returns it as a sentence.

        Raises:
            RunFailed: with every reason, if they do not fit.
            TrainerLost: if the cluster does not answer.
        """
        what = " and ".join(orders)
        try:
            plan = await cluster.plan(*orders.values())
        except PlacementRefused as error:
            raise RunFailed(f"The {what} do not fit cluster {name!r}: {error}.") from error
        except ClusterFailed as error:
            raise TrainerLost(f"Cluster {name!r} does not answer: {error}.") from error
        of = "" if what == "ranks" else f" of {what}"
        return f"Placement{of} on cluster {name!r}: {plan}."

    def _group_options(
        self, compute: ComputeSettings, training_run: str, notify: Notify = lambda severity, text: None
    ) -> GroupOptions:
        """Returns the options of a run's group of ranks.

        Raises:
            RunFailed: if its cluster is none of the operator's.
        """
        assert compute.parallel.kind != "none"
        settings = self._settings
        return GroupOptions(
            device=settings.device,
            torch_threads=settings.torch_threads,
            call_deadline_s=settings.trainer_deadline_s,
            gpus=shown_gpus(compute.parallel),
            cluster=of_run(self._cluster(compute.parallel.cluster), training_run, notify),
        )

    def _cluster(self, name: str) -> Cluster:
        if name not in self._clusters:
            raise RunFailed(f"This service no longer has cluster {name!r}; it has {', '.join(sorted(self._clusters))}.")
        return self._clusters[name]

    async def build_model(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        """Builds the first weights of a policy; see `ModelBuilder.build`."""
        await self._builder.build(bundle, target, files, seed=seed)

    def close(self) -> None:
        """Waits for the present call of torch."""
        if self._torch_thread is not None:
            self._torch_thread.close()

    def _patience(self, notify: Notify) -> Patience:
        return Patience(service="store", notify=notify, limit_s=self._settings.outage_limit_s)

    def _server_access(self, setup: TrainerSetup, token_file: Path | None) -> ServerAccess:
        assert setup.exchange is not None
        return ServerAccess(
            training_run=setup.training_run,
            token_file="" if token_file is None else str(token_file.absolute()),
            tls={target: self._tls_to(target) for target in set(setup.exchange.link.addresses.values())},
        )

    def _tls_to(self, target: str) -> TlsFiles | None:
        """Returns the TLS files with which ranks call a server of shards; None without TLS.

        Raises:
            RunFailed: if the file of its authorities cannot be read.
        """
        settings = self._settings
        if target not in settings.exchange_targets:
            return settings.sibling_tls()
        file = settings.exchange_targets[target]
        if not file:
            return None
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise RunFailed(f"A file of the setting exchange_targets cannot be read: {error.strerror}.") from error
        return TlsFiles(ca_file=file, certificate_file=settings.tls_certificate_file, key_file=settings.tls_key_file)


def _clusters_of(settings: RunSettings, *, trains: bool) -> list[str]:
    """Returns the clusters that a run asks for something, that of its ranks first."""
    ranks, engine = _ranks_cluster(settings, trains=trains), settings.engine
    engines = engine.cluster if isinstance(engine, StartedEngine) and is_on_cluster(engine) else ""
    return [name for name in dict.fromkeys((ranks, engines)) if name]


def _ranks_cluster(settings: RunSettings, *, trains: bool) -> str:
    return settings.cluster if trains and isinstance(settings, AlgorithmSettings) else ""


def _isolator(settings: AlgorithmServiceSettings) -> Isolator:
    """Returns the isolation of clients' code."""
    return Isolator(
        settings.isolation,
        setting="FULMEN_ALGORITHM_ISOLATION",
        readable=[Path(part.strip()) for part in settings.sandbox_readable.split(",") if part.strip()],
        hidden=(*settings.private_files, settings.state_dir),
    )


def _build_folder(settings: AlgorithmServiceSettings) -> Path | None:
    """Returns the parent of the files of building a policy; None for the system's temporary folder."""
    if settings.build_dir:
        return Path(settings.build_dir)
    has_own_user = os.geteuid() == 0 and settings.isolation is not Isolation.TRUSTED
    return None if has_own_user else settings.state_dir.absolute() / "builds"


def by_address(keys: Mapping[str, SecretStr]) -> dict[str, str]:
    """Returns API keys by address, without slashes at the end."""
    return {url.rstrip("/"): key.get_secret_value() for url, key in keys.items()}
