"""The service's parts and how they are joined, from the state folder and the channels up to the server."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc.aio
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from fulmen.algorithm.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from fulmen.algorithm.v1.training_run_service_pb2_grpc import add_TrainingRunServiceServicer_to_server
from fulmen.algorithm.v1.weight_service_pb2_grpc import add_WeightServiceServicer_to_server
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_algorithm.algorithms.registry import AlgorithmsInvalid, load_registry
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.hub import HubLimits, HubModels
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.connections import ServiceConnections, by_address
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.loops.processes import LoopProcesses
from fulmen_algorithm.loops.publication import Publisher
from fulmen_algorithm.loops.rules import RowLimits
from fulmen_algorithm.loops.trainers import TrainerLimits, Trainers
from fulmen_algorithm.models.bases import BaseModels, used_by
from fulmen_algorithm.models.model_store import ModelStore
from fulmen_algorithm.models.sweeper import ModelSweeper
from fulmen_algorithm.models.transfers import Transfers
from fulmen_algorithm.models.uploads import UploadLimits, Uploads
from fulmen_algorithm.models.version_weights import VersionWeights
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.algorithm import Registry
from fulmen_algorithm.runs.creation.rules import CreationRules, IsTaken
from fulmen_algorithm.runs.execution import RunExecutor
from fulmen_algorithm.runs.first_weights import WeightSources
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.prometheus import RunMetrics
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.sinks.sink import OpenSink, load_sink
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.run_access import CallerRuns
from fulmen_algorithm.transport.trainers import TrainerServicer
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_algorithm.transport.weights import UsedBy, WeightServicer
from fulmen_exchange.server.prometheus import ExchangeMetrics
from fulmen_exchange.server.servicer import ExchangeLimits, GradientExchangeServicer, add_exchange
from fulmen_service_kit.errors import StartupError
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
SERVICE_NAMES = (TRAINING_RUN_SERVICE, GRADIENT_EXCHANGE_SERVICE, WEIGHT_SERVICE, TRAINER_SERVICE)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the service's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if the port is in use, another process works on the state folder, or an algorithm or a metric
            sink cannot be loaded.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, AlgorithmServiceSettings):
        raise TypeError("The algorithm service needs AlgorithmServiceSettings.")

    # What is stored, and the other services.
    algorithms = _algorithms(settings)
    storage = stack.enter_context(RunStorage(settings.state_dir, url=settings.run_storage))
    runs = RunRegistry(storage, clock=_now, max_concurrent=settings.max_concurrent_runs)
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
    engines = _engines(settings, modules, proxy, ownership)
    rank_tokens = RankTokens(store, folder=settings.state_dir / "rank-tokens", outage_limit_s=settings.outage_limit_s)
    connections = ServiceConnections(
        settings, store=store, proxy=proxy, engines=engines, rank_tokens=rank_tokens, modules=modules
    )
    stack.callback(connections.close)
    await connections.isolator.report()
    models = ModelStore(storage.folder.with_name("models"))
    uploads = Uploads(models, _upload_limits(settings))
    roots = ModelRoots.of(settings.model_roots, runs=storage.folder, models=models.folder)
    bases = BaseModels(models, _hub(settings))
    executor = RunExecutor(
        registry=algorithms,
        connections=connections,
        keep_checkpoints=settings.keep_checkpoints,
        keep_models=settings.keep_models,
        machine={"device": settings.device, "torch_threads": str(settings.torch_threads)},
        check_owned=ownership.check,
        model_roots=roots,
        models=bases,
    )
    worker = RunWorker(runs, executor, ownership)
    publisher = MetricPublisher(runs, _sinks(settings))
    _export(RunMetrics(runs), stack)

    # The server.
    exchange = _exchange(settings, runs)
    _export(ExchangeMetrics(exchange.held), stack)
    servicer = TrainingRunServicer(
        runs=runs,
        worker=worker,
        connections=connections,
        clock=_now,
        rules=_rules(settings, algorithms, roots, bases, is_taken=partial(_is_taken, runs, engines)),
        ownership=ownership,
        forwarding=Forwarding(settings.sibling_tls()),
        address=address,
    )

    trainers = _trainers(
        settings,
        storage,
        GroupOptions(
            device=settings.device,
            torch_threads=settings.torch_threads,
            call_deadline_s=settings.trainer_deadline_s,
            modules=modules,
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
            "metric_publisher": publisher,
            "revocations": followed.follower,
            "own_token": TokenRefresher(token, store),
            "rank_tokens": rank_tokens,
        },
        drain=drain,
    )


def _algorithms(settings: AlgorithmServiceSettings) -> Registry:
    files = [Path(file).expanduser() for file in settings.modules.split(os.pathsep) if file]
    try:
        return load_registry(files)
    except AlgorithmsInvalid as error:
        raise StartupError(f"{error}.") from error


def _exchange(settings: AlgorithmServiceSettings, runs: RunRegistry) -> GradientExchangeServicer:
    return GradientExchangeServicer(
        runs=CallerRuns(runs),
        folder=None if settings.exchange_sums == "none" else settings.state_dir / "exchange",
        is_synced=settings.exchange_sums == "synced",
        limits=ExchangeLimits(
            max_shards=settings.exchange_max_shards,
            max_elements=settings.exchange_max_elements,
            max_staged_bytes=settings.exchange_max_staged_bytes,
            forget_s=settings.exchange_forget_s,
            keep_s=settings.exchange_keep_s,
        ),
    )


def _trainers(
    settings: AlgorithmServiceSettings,
    storage: RunStorage,
    options: GroupOptions,
    *,
    sources: Callable[[str], WeightSources],
) -> Trainers:
    return Trainers(
        settings.state_dir.absolute() / "trainers",
        limits=TrainerLimits(
            max_trainers=settings.max_trainers,
            max_checkpoints=settings.max_trainer_checkpoints,
            max_bytes=settings.max_trainer_bytes,
            idle_s=settings.trainer_idle_s,
            keep_s=settings.trainer_keep_s,
        ),
        processes=LoopProcesses(options, max_processes=settings.max_trainer_processes),
        publisher=Publisher(
            storage=storage, resources=lambda project: sources(project).resources, keep=settings.keep_models
        ),
        sources=sources,
    )


def _used_by(runs: RunRegistry, models: ModelStore, trainers: Trainers) -> UsedBy:
    """Returns what finds the run or the trainer that needs a model."""
    of_runs = used_by(runs)
    return lambda model: of_runs(model) or trainers.using(models.place(model.name.project) / model.name.id)


def _sinks(settings: AlgorithmServiceSettings) -> dict[str, OpenSink]:
    sinks: dict[str, OpenSink] = {}
    for name in filter(None, (part.strip() for part in settings.metric_sinks.split(","))):
        try:
            sinks[name] = load_sink(name)
        except ImportError:
            raise StartupError(f"The metric sink {name!r} needs `pip install 'fulmen-algorithm[{name}]'`.") from None
    return sinks


def _export(metrics: Collector, stack: AsyncExitStack) -> None:
    """Exports metrics to Prometheus until the service stops."""
    REGISTRY.register(metrics)
    stack.callback(REGISTRY.unregister, metrics)


def _engines(
    settings: AlgorithmServiceSettings, modules: ModuleStarter, proxy: FulmenChannel, ownership: RunOwnership
) -> EnginePool:
    return EnginePool(
        _engine_options(settings),
        starter=EngineStarter(modules, in_process=settings.engine_in_process),
        proxy=proxy,
        backend_prefix=settings.engine_backend,
        file=ServedPolicies(settings.state_dir / "served.json"),
        max_engines=settings.max_engines,
        outage_limit_s=settings.outage_limit_s,
        still_serves=partial(ownership.serves, timeout_s=settings.run_lease_s),
    )


def _hub(settings: AlgorithmServiceSettings) -> HubModels:
    return HubModels(
        settings.hub_models,
        HubLimits(max_bytes=settings.hub_max_bytes, deadline_s=settings.hub_deadline_s),
        variables={"HF_HOME": settings.hub_cache, "HF_TOKEN": settings.hub_token.get_secret_value()},
    )


def _upload_limits(settings: AlgorithmServiceSettings) -> UploadLimits:
    return UploadLimits(
        max_bytes=settings.upload_max_bytes,
        quota_bytes=settings.upload_quota_bytes,
        idle_s=settings.upload_idle_s,
        keep_s=settings.upload_keep_s,
    )


def _rules(
    settings: AlgorithmServiceSettings,
    algorithms: Registry,
    roots: ModelRoots,
    models: BaseModels,
    *,
    is_taken: IsTaken,
) -> CreationRules:
    return CreationRules(
        registry=algorithms,
        vllm_command=settings.vllm_command,
        external_engines=frozenset(by_address(settings.external_engines)),
        endpoints=frozenset(by_address(settings.chat_endpoints)),
        exchange_targets=settings.known_exchange_targets,
        model_roots=roots,
        models=models,
        is_taken=is_taken,
    )


async def _is_taken(runs: RunRegistry, engines: EnginePool, policy: str, project: str) -> bool:
    """Returns whether an unfinished run of another project trains a policy, or a route outside the project has its name."""
    return runs.trains_elsewhere(policy, project) or await engines.is_taken(policy, project)


def _engine_options(settings: AlgorithmServiceSettings) -> EngineOptions:
    return EngineOptions(
        host=settings.engine_host,
        advertise_host=settings.engine_advertise_host,
        port=settings.engine_port,
        token=settings.engine_token.get_secret_value(),
        torch_threads=settings.torch_threads,
        device=settings.device,
        max_batch_size=settings.engine_max_batch_size,
        log_folder=settings.state_dir.absolute() / "engines",
        vllm_command=settings.vllm_command,
        vllm_start_deadline_s=settings.vllm_start_deadline_s,
        # vLLM exports traces without TLS, whatever the scheme of the address.
        otlp_endpoint=settings.otlp_endpoint if settings.otlp_endpoint.startswith("http:") else "",
        external_keys=by_address(settings.external_engines),
    )


def _now() -> datetime:
    return datetime.now(UTC)
