"""The parts of the algorithm service and how they are joined."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY
from pydantic import SecretStr

from fulmen.algorithm.v1.training_run_service_pb2_grpc import add_TrainingRunServiceServicer_to_server
from fulmen.rpc.channel import FulmenChannel, Token, open_channel
from fulmen.tls import TlsFiles
from fulmen_algorithm.algorithms.registry import AlgorithmsInvalid, load_registry
from fulmen_algorithm.clients.chat import ChatClient
from fulmen_algorithm.clients.model_builder import ModelBuilder
from fulmen_algorithm.clients.patience import Notify, Patience
from fulmen_algorithm.clients.store import RolloutRequest, StoreQueue, StoreResources
from fulmen_algorithm.engines.engine import Engine, EngineOptions
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.engines.proxy_admin import ProxyAdmin, backend_id
from fulmen_algorithm.engines.starter import EngineStarter, unavailable
from fulmen_algorithm.persistence.served_policies import ServedPolicies
from fulmen_algorithm.persistence.state_folder import StateFolder
from fulmen_algorithm.policy.trainer import OpenTrainer, Trainer, TrainerSetup
from fulmen_algorithm.runs.algorithm import Registry, RunSettings
from fulmen_algorithm.runs.creation import CreationRules
from fulmen_algorithm.runs.execution import Connections, RunExecutor
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.prometheus import RunMetrics
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.sinks.sink import OpenSink, load_sink
from fulmen_algorithm.trainers.rank_group import GroupOptions, RankGroupTrainer
from fulmen_algorithm.transport.exchange_runs import CallerRuns
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.server.prometheus import ExchangeMetrics
from fulmen_exchange.server.runs import Run
from fulmen_exchange.server.servicer import ExchangeLimits, GradientExchangeServicer, add_exchange
from fulmen_service_kit.auth import RolePolicy
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.lifecycle import Role as BackgroundRole
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.revocation import RevocationFollower, RevokedTokens, revoked_at_store
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import OwnToken, Role, TokenSigner, TokenVerifier

TRAINING_RUN_SERVICE = "fulmen.algorithm.v1.TrainingRunService"
GRADIENT_EXCHANGE_SERVICE = "fulmen.algorithm.v1.GradientExchangeService"
READS = (
    "ListAlgorithms",
    "GetTrainingRun",
    "ListTrainingRuns",
    "WatchTrainingRun",
    "ListCheckpoints",
    "GetTrainingRunReport",
)
RANK_TOKEN_TTL_S = 30 * 86_400.0
"""Validity of the token of a group of ranks, which cannot renew it: ranks never see the signing key.

A group that lives longer is refused with a clear error; the run resumes from its newest checkpoint with a new group.
"""
EXCHANGE_READS = ("GetExchange", "GetRound")
POLICY = RolePolicy(
    services={
        TRAINING_RUN_SERVICE: frozenset({Role.CLIENT, Role.SERVICE}),
        GRADIENT_EXCHANGE_SERVICE: frozenset({Role.SERVICE}),
    },
    rpcs={
        f"/{service}/{rpc}": frozenset({Role.CLIENT, Role.SERVICE, Role.READER})
        for service, rpcs in ((TRAINING_RUN_SERVICE, READS), (GRADIENT_EXCHANGE_SERVICE, EXCHANGE_READS))
        for rpc in rpcs
    },
    audited={
        f"/{TRAINING_RUN_SERVICE}/{rpc}": fields
        for rpc, fields in (
            ("CreateTrainingRun", ("training_run.name", "training_run.project", "training_run.algorithm")),
            ("PauseTrainingRun", ("name",)),
            ("ResumeTrainingRun", ("name",)),
            ("CancelTrainingRun", ("name",)),
            ("RollbackTrainingRun", ("checkpoint",)),
        )
    },
)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the service's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if the port is in use, another process works on the state folder, or an algorithm cannot be loaded.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, AlgorithmServiceSettings):
        raise TypeError("The algorithm service needs AlgorithmServiceSettings.")
    registry = _registry(settings)
    state = stack.enter_context(StateFolder(settings.state_dir))
    store, proxy = await _channels(settings, stack)
    runs = RunRegistry(open_file=state.run_files, clock=_now, max_concurrent=settings.max_concurrent_runs)
    for run, files in state.runs():
        runs.restore(run, files)
    engines = _engines(settings, proxy)
    connections = _connections(settings, store, proxy, engines, _trainers(settings, stack))
    executor = RunExecutor(
        registry=registry,
        runs=runs,
        connections=connections,
        open_folder=state.run_files,
        keep_checkpoints=settings.keep_checkpoints,
        keep_models=settings.keep_models,
        machine={"device": settings.device, "torch_threads": str(settings.torch_threads)},
    )
    worker = RunWorker(runs, executor)
    servicer = TrainingRunServicer(
        runs=runs,
        worker=worker,
        resources=connections.resources,
        open_files=state.run_files,
        clock=_now,
        rules=CreationRules(
            registry=registry,
            unavailable=partial(unavailable, _engine_options(settings)),
            endpoints=frozenset(_by_address(settings.chat_endpoints)),
            exchange_targets=settings.known_exchange_targets,
        ),
    )
    exchange = _exchange(settings, runs, stack)

    def register(server: grpc.aio.Server) -> None:
        add_TrainingRunServiceServicer_to_server(servicer, server)
        add_exchange(exchange, server)

    revoked = RevokedTokens()
    server = build_server(
        settings,
        verifier=TokenVerifier(settings.signing_keys(), revoked=revoked),
        policy=POLICY,
        service_names=tuple(POLICY.services),
        register=register,
    )

    revocations = RevocationFollower(revoked=revoked, fetch=revoked_at_store(store))
    # Runs wait while the store is unavailable, and resume.
    server.readiness.add("store", lambda: revocations.problem, is_needed=False)

    async def drain() -> None:
        servicer.drain()
        exchange.drain()
        await worker.drain()

    roles: dict[str, BackgroundRole] = {
        "run_worker": worker,
        "engine_pool": engines,
        "gradient_exchange": exchange,
        "metric_publisher": _metric_publisher(settings, runs, stack),
        "revocations": revocations,
    }
    return ServiceParts(server=server, roles=roles, drain=drain)


async def _channels(settings: AlgorithmServiceSettings, stack: AsyncExitStack) -> tuple[FulmenChannel, FulmenChannel]:
    """Opens the channels to the store and to the proxy."""
    token, tls = _token(settings), settings.peer_tls()
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token, tls=tls))
    proxy = await stack.enter_async_context(open_channel(settings.llm_proxy_target, token=token, tls=tls))
    return store, proxy


def _engines(settings: AlgorithmServiceSettings, proxy: FulmenChannel) -> EnginePool:
    return EnginePool(
        _engine_options(settings),
        start=EngineStarter(_start_engine_inside) if settings.engine_in_process else EngineStarter(),
        admin=lambda policy: ProxyAdmin(proxy, backend_id=backend_id(settings.engine_backend, policy)),
        file=ServedPolicies(settings.state_dir / "served.json"),
        max_engines=settings.max_engines,
        outage_limit_s=settings.outage_limit_s,
    )


def _exchange(settings: AlgorithmServiceSettings, runs: RunRegistry, stack: AsyncExitStack) -> GradientExchangeServicer:
    def project_of(name: str) -> str:
        return runs.entry(name).run.project

    def is_over(run: Run) -> bool:
        project, name = run
        return runs.has(name, project) and runs.entry(name).run.state.final

    servicer = GradientExchangeServicer(
        runs=CallerRuns(project_of=project_of, is_over=is_over),
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
    shown = ExchangeMetrics(servicer.held)
    REGISTRY.register(shown)
    stack.callback(REGISTRY.unregister, shown)
    return servicer


def _registry(settings: AlgorithmServiceSettings) -> Registry:
    files = [Path(file).expanduser() for file in settings.modules.split(os.pathsep) if file]
    try:
        return load_registry(files)
    except AlgorithmsInvalid as error:
        raise StartupError(f"{error}.") from error


def _trainers(settings: AlgorithmServiceSettings, stack: AsyncExitStack) -> OpenTrainer:
    """Returns what opens trainers; torch is loaded when the first one is, which takes seconds."""
    group = GroupOptions(
        device=settings.device,
        torch_threads=settings.torch_threads,
        call_deadline_s=settings.trainer_deadline_s,
    )

    async def open_trainer(setup: TrainerSetup) -> Trainer:
        if setup.exchange is not None and setup.exchange.link.targets:
            setup = replace(setup, server_access=await asyncio.to_thread(_server_access, settings, setup))
        if setup.compute.parallel.kind != "none":
            return await RankGroupTrainer.open(setup, group)
        in_process = await asyncio.to_thread(import_module, "fulmen_algorithm.trainers.in_process")
        threads = await asyncio.to_thread(import_module, "fulmen_algorithm.trainers.in_process")
        if not opened:
            opened.append(threads.TorchThread(torch_threads=settings.torch_threads))
            stack.callback(opened[0].close)
        trainer: Trainer = await in_process.InProcessTrainer.open(setup, thread=opened[0], device=settings.device)
        return trainer

    opened: list[Any] = []
    return open_trainer


async def _start_engine_inside(options: EngineOptions, policy: PublishedPolicy) -> Engine:
    from fulmen_algorithm.engines.in_process import start_engine_inside  # it loads torch

    return await start_engine_inside(options, policy)


def _connections(
    settings: AlgorithmServiceSettings,
    store: FulmenChannel,
    proxy: FulmenChannel,
    engines: EnginePool,
    open_trainer: OpenTrainer,
) -> Connections:
    def patience(notify: Notify) -> Patience:
        return Patience(service="store", notify=notify, limit_s=settings.outage_limit_s)

    def queue(run: TrainingRun, run_settings: RunSettings, notify: Notify) -> StoreQueue:
        limits = run_settings.rollout_limits
        request = RolloutRequest(
            project=run.project,
            training_run=run.name,
            agent=run.inputs.get("agent", ""),
            attempt_timeout_s=limits.timeout_s,
            max_attempts=limits.attempts,
            resource_versions={use: run.inputs[use] for use in ("prompt",) if use in run.inputs},
        )
        return StoreQueue(store, request, patience(notify))

    builder = ModelBuilder(deadline_s=settings.build_deadline_s, torch_threads=settings.torch_threads)
    return Connections(
        queue=queue,
        resources=lambda project, notify: StoreResources(store, project, patience(notify)),
        serving=lambda run, run_settings, notify: engines.serving(run.name, run_settings.engine, notify),
        chat=lambda notify: ChatClient(
            proxy, endpoints=_by_address(settings.chat_endpoints), outage_limit_s=settings.outage_limit_s, notify=notify
        ),
        open_trainer=open_trainer,
        build_model=builder.build,
    )


def _metric_publisher(settings: AlgorithmServiceSettings, runs: RunRegistry, stack: AsyncExitStack) -> MetricPublisher:
    """Exports the runs to Prometheus, and loads the configured sinks.

    Raises:
        StartupError: if the library of one is not installed.
    """
    shown = RunMetrics(runs)
    REGISTRY.register(shown)
    stack.callback(REGISTRY.unregister, shown)
    sinks: dict[str, OpenSink] = {}
    for name in filter(None, (part.strip() for part in settings.metric_sinks.split(","))):
        try:
            sinks[name] = load_sink(name)
        except ImportError:
            raise StartupError(f"The metric sink {name!r} needs `pip install 'fulmen-algorithm[{name}]'`.") from None
    return MetricPublisher(runs, sinks, folder=settings.state_dir / "runs")


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
        external_keys=_by_address(settings.external_engines),
    )


def _by_address(keys: Mapping[str, SecretStr]) -> dict[str, str]:
    return {url.rstrip("/"): key.get_secret_value() for url, key in keys.items()}


def _server_access(settings: AlgorithmServiceSettings, setup: TrainerSetup) -> ServerAccess:
    assert setup.exchange is not None
    keys = settings.signing_keys()
    signer = TokenSigner(keys) if keys else None
    return ServerAccess(
        training_run=setup.training_run,
        token=signer.issue(Role.SERVICE, subject="ranks", ttl_s=RANK_TOKEN_TTL_S, project=setup.project)
        if signer
        else "",
        tls={target: _tls_to(settings, target) for target in setup.exchange.link.targets},
    )


def _tls_to(settings: AlgorithmServiceSettings, target: str) -> TlsFiles | None:
    """Returns with what ranks call a server of shards.

    Raises:
        RunFailed: if the file of its authorities cannot be read.
    """
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


def _token(settings: AlgorithmServiceSettings) -> Token:
    if settings.token.get_secret_value():
        return settings.secret("token")
    return OwnToken(settings.signing_keys(), Role.SERVICE, subject="algorithm")


def _now() -> datetime:
    return datetime.now(UTC)
