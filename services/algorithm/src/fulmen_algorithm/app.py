"""The service's parts and how they are joined, from the state folder and the channels up to the server."""

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import grpc.aio
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from fulmen.algorithm.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from fulmen.algorithm.v1.rank_service_pb2_grpc import add_RankServiceServicer_to_server
from fulmen.algorithm.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from fulmen.algorithm.v1.training_run_service_pb2_grpc import add_TrainingRunServiceServicer_to_server
from fulmen.algorithm.v1.weight_service_pb2_grpc import add_WeightServiceServicer_to_server
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.engine_tokens import EngineTokens
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_algorithm.clients.run_history import StoreRunHistory
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.cluster.gpus.machine import ORDER, ORDER_VARIABLE, NvidiaSmi
from fulmen_algorithm.cluster.gpus.runs import RunGpus
from fulmen_algorithm.cluster.joined import JoinedCluster, JoinedMachines
from fulmen_algorithm.cluster.joining import RunRanks
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.connections import ServiceConnections
from fulmen_algorithm.engines.joining import RunEngines
from fulmen_algorithm.engines.on_clusters import ClusterAccess, ClusterEngines
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.loops.rules import RowLimits
from fulmen_algorithm.loops.trainers import Trainers
from fulmen_algorithm.models.bases import BaseModels, used_by
from fulmen_algorithm.models.model_store import ModelStore
from fulmen_algorithm.models.transfers import Transfers
from fulmen_algorithm.models.uploads import ModelSweeper, Uploads
from fulmen_algorithm.models.version_weights import VersionWeights
from fulmen_algorithm.parts import (
    algorithms_of,
    clusters_of,
    engines_of,
    exchange_of,
    hub_of,
    rules_of,
    sinks_of,
    trainers_of,
    upload_limits_of,
)
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.first_weights import WeightSources
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.runs.execution import RunExecutor
from fulmen_algorithm.runs.history import HistoryDelivery
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.prometheus import RunMetrics
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.transport.engines import EngineServicer
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.ranks import RankServicer
from fulmen_algorithm.transport.trainers import TrainerServicer
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_algorithm.transport.weights import UsedBy, WeightServicer
from fulmen_exchange.server.prometheus import ExchangeMetrics
from fulmen_exchange.server.servicer import add_exchange
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.keys import PUBLIC_KEYS_FILE, PublishedKeys
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.revocation import follow_store
from fulmen_service_kit.settings import ServiceSettings

TRAINING_RUN_SERVICE = "fulmen.algorithm.v1.TrainingRunService"
GRADIENT_EXCHANGE_SERVICE = "fulmen.algorithm.v1.GradientExchangeService"
WEIGHT_SERVICE = "fulmen.algorithm.v1.WeightService"
TRAINER_SERVICE = "fulmen.algorithm.v1.TrainerService"
ENGINE_SERVICE = "fulmen.algorithm.v1.EngineService"
RANK_SERVICE = "fulmen.algorithm.v1.RankService"
SERVICE_NAMES = (
    TRAINING_RUN_SERVICE,
    GRADIENT_EXCHANGE_SERVICE,
    WEIGHT_SERVICE,
    TRAINER_SERVICE,
    ENGINE_SERVICE,
    RANK_SERVICE,
)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the service's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if the port is in use, another process works on the state folder, or an algorithm or a metric
            sink cannot be loaded.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, AlgorithmServiceSettings):
        raise TypeError("The algorithm service needs AlgorithmServiceSettings.")

    # This process counts GPUs as what it starts does.
    os.environ.setdefault(ORDER_VARIABLE, ORDER)

    # What is stored, and the other services.
    algorithms = algorithms_of(settings)
    storage = stack.enter_context(RunStorage(settings.state_dir, url=settings.run_storage))
    runs = RunRegistry(
        storage, clock=_now, max_concurrent=settings.max_concurrent_runs, max_of_project=settings.project_max_runs
    )
    for run, files in storage.runs():
        runs.restore(run, files)
    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token, tls=tls))
    proxy = await stack.enter_async_context(open_channel(settings.llm_proxy_target, token=token, tls=tls))

    # Runs.
    modules = ModuleStarter(warm=settings.warm_start)
    stack.callback(modules.close)

    def address() -> str:
        return settings.peer_address(server.port)

    leases = StoreRunLeases(
        store, owner=storage.owner, storage=storage.storage_id, address=address, ttl_s=settings.run_lease_s
    )
    ownership = RunOwnership(
        runs, leases, storage, lease_s=settings.run_lease_s, outage_limit_s=settings.outage_limit_s
    )
    local = LocalCluster(modules)
    machines = JoinedMachines()
    clusters = clusters_of(settings, local, machines, stack)
    access = ClusterAccess(
        clusters=clusters,
        tokens=EngineTokens(store, outage_limit_s=settings.outage_limit_s),
        agent_settings=lambda: settings.of_weight_agents(address()),
    )
    engines = engines_of(settings, modules, proxy, ownership, ClusterEngines(access))
    rank_tokens = RankTokens(store, folder=settings.state_dir / "rank-tokens", outage_limit_s=settings.outage_limit_s)
    gpus = RunGpus(NvidiaSmi(device=settings.device), device=settings.device)
    connections = ServiceConnections(
        settings,
        store=store,
        proxy=proxy,
        engines=engines,
        rank_tokens=rank_tokens,
        clusters=clusters,
        modules=modules,
        gpus=gpus,
    )
    stack.callback(connections.close)
    await connections.isolator.report()
    models = ModelStore(storage.folder.with_name("models"))
    uploads = Uploads(models, upload_limits_of(settings))
    roots = ModelRoots.of(settings.model_roots, runs=storage.folder, models=models.folder)
    bases = BaseModels(models, hub_of(settings))
    executor = RunExecutor(
        registry=algorithms,
        connections=connections,
        keep_checkpoints=settings.keep_checkpoints,
        keep_models=settings.keep_models,
        machine={"device": settings.device, "torch_threads": str(settings.torch_threads)},
        check_owned=ownership.check,
        model_roots=roots,
        models=bases,
        on_no_signal=settings.on_no_signal,
    )
    worker = RunWorker(runs, executor, ownership)
    history = HistoryDelivery(runs, StoreRunHistory(store))
    publisher = MetricPublisher(runs, sinks_of(settings))
    _export(RunMetrics(runs), stack)

    # The server.
    forwarding = Forwarding(settings.sibling_tls(), address)
    joining = EngineServicer(RunEngines(runs, engines, fan_out=settings.engine_fan_out), forwarding)
    ranks = RankServicer(
        RunRanks(
            runs,
            machines,
            is_joined=lambda cluster: isinstance(clusters.get(cluster), JoinedCluster),
            silence_s=settings.cluster_silence_s,
        ),
        forwarding,
    )
    exchange = exchange_of(settings, runs)
    _export(ExchangeMetrics(exchange.held), stack)
    servicer = TrainingRunServicer(
        runs=runs,
        worker=worker,
        connections=connections,
        clock=_now,
        rules=replace(
            rules_of(settings, algorithms, roots, bases, is_taken=partial(_is_taken, runs, engines)),
            gpu_plan=gpus.plan,
            cluster_plan=connections.cluster_plan,
        ),
        ownership=ownership,
        forwarding=forwarding,
    )

    trainers = trainers_of(
        settings,
        storage,
        GroupOptions(
            device=settings.device,
            torch_threads=settings.torch_threads,
            call_deadline_s=settings.trainer_deadline_s,
            cluster=local,
        ),
        sources=lambda project: WeightSources(
            resources=connections.resources_of(project), roots=roots, models=bases, notify=lambda severity, text: None
        ),
    )
    trainer_servicer = TrainerServicer(
        trainers, RowLimits(max_rows=settings.max_trainer_rows, max_tokens=settings.max_trainer_tokens)
    )
    model_used_by = _used_by(runs, models, trainers)
    transfers = Transfers(ProjectLimits.configured(settings), max_open=settings.max_transfers)
    stack.callback(transfers.close)
    weights = WeightServicer(
        models=models,
        uploads=uploads,
        versions=VersionWeights(
            resources=connections.resources_of,
            storage=storage,
            roots=roots,
            rebuilt=settings.state_dir.absolute() / "rebuilt",
        ),
        transfers=transfers,
        used_by=model_used_by,
    )

    def register(server: grpc.aio.Server) -> None:
        add_WeightServiceServicer_to_server(weights, server)
        add_EngineServiceServicer_to_server(joining, server)
        add_RankServiceServicer_to_server(ranks, server)
        add_TrainerServiceServicer_to_server(trainer_servicer, server)
        add_TrainingRunServiceServicer_to_server(servicer, server)
        add_exchange(exchange, server)

    followed = follow_store(store, PublishedKeys(file=settings.state_dir / PUBLIC_KEYS_FILE))
    server = build_server(
        settings,
        verifier=followed.verifier,
        service_names=SERVICE_NAMES,
        register=register,
    )
    # Not needed to be ready: runs wait while the store is unavailable, and resume.
    server.readiness.add("store", lambda: followed.follower.problem, is_needed=False)

    async def drain() -> None:
        servicer.drain()
        weights.drain()
        joining.drain()
        ranks.drain()
        exchange.drain()
        trainer_servicer.drain()
        await asyncio.gather(worker.drain(), trainers.drain())

    return ServiceParts(
        server=server,
        roles={
            "run_worker": worker,
            "run_leases": ownership,
            "engine_pool": engines,
            "model_sweeper": ModelSweeper(uploads, used_by=model_used_by),
            "trainers": trainers,
            "gradient_exchange": exchange,
            "run_history": history,
            "metric_publisher": publisher,
            "revocations": followed.follower,
            "own_token": TokenRefresher(token, store),
            "rank_tokens": rank_tokens,
        },
        drain=drain,
    )


def _used_by(runs: RunRegistry, models: ModelStore, trainers: Trainers) -> UsedBy:
    """Returns what finds the run or the trainer that needs a model."""
    of_runs = used_by(runs)
    return lambda model: of_runs(model) or trainers.using(models.place(model.name.project) / model.name.id)


def _export(metrics: Collector, stack: AsyncExitStack) -> None:
    """Exports metrics to Prometheus until the service stops."""
    REGISTRY.register(metrics)
    stack.callback(REGISTRY.unregister, metrics)


async def _is_taken(runs: RunRegistry, engines: EnginePool, policy: str, project: str) -> bool:
    """Returns whether an unfinished run of another project trains a policy, or a route outside the project has its name."""
    return runs.trains_elsewhere(policy, project) or await engines.is_taken(policy, project)


def _now() -> datetime:
    return datetime.now(UTC)
