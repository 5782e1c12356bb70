"""The service's parts and how they are joined, from the state folder and the channels up to the server."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_algorithm.clients.run_history import StoreRunHistory
from fulmen_algorithm.cluster.gpus.machine import ORDER, ORDER_VARIABLE
from fulmen_algorithm.connections import ServiceConnections
from fulmen_algorithm.models.uploads import ModelSweeper
from fulmen_algorithm.runs.history import HistoryDelivery
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.prometheus import RunMetrics
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.wiring.compute import open_compute
from fulmen_algorithm.wiring.models import models_of, users_of_models
from fulmen_algorithm.wiring.runs import open_runs, sinks_of, worker_of
from fulmen_algorithm.wiring.servicers import Parts, Servicers
from fulmen_algorithm.wiring.trainers import trainers_of
from fulmen_exchange.server.prometheus import ExchangeMetrics
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.keys import PUBLIC_KEYS_FILE, PublishedKeys
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

    def address() -> str:
        return settings.peer_address(server.port)

    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token, tls=tls))
    proxy = await stack.enter_async_context(open_channel(settings.llm_proxy_target, token=token, tls=tls))
    parts = await _open_parts(settings, stack, store, proxy, address=address)
    publisher = MetricPublisher(parts.runs.registry, sinks_of(settings))

    servicers = Servicers(settings, parts, stack)
    for metrics in (RunMetrics(parts.runs.registry), ExchangeMetrics(servicers.exchange.held)):
        _export(metrics, stack)
    followed = follow_store(store, PublishedKeys(file=settings.state_dir / PUBLIC_KEYS_FILE))
    server = build_server(
        settings, verifier=followed.verifier, service_names=SERVICE_NAMES, register=servicers.register
    )
    # Not needed to be ready: runs wait while the store is unavailable, and resume.
    server.readiness.add("store", lambda: followed.follower.problem, is_needed=False)

    async def drain() -> None:
        servicers.drain()
        await asyncio.gather(parts.worker.drain(), parts.trainers.drain())

    return ServiceParts(
        server=server,
        roles={
            "run_worker": parts.worker,
            "run_leases": parts.runs.ownership,
            "engine_pool": parts.compute.engines,
            "model_sweeper": ModelSweeper(parts.models.uploads, used_by=parts.used_by),
            "trainers": parts.trainers,
            "gradient_exchange": servicers.exchange,
            "run_history": HistoryDelivery(parts.runs.registry, StoreRunHistory(store)),
            "metric_publisher": publisher,
            "revocations": followed.follower,
            "own_token": TokenRefresher(token, store),
            "rank_tokens": parts.rank_tokens,
        },
        drain=drain,
    )


async def _open_parts(
    settings: AlgorithmServiceSettings,
    stack: AsyncExitStack,
    store: FulmenChannel,
    proxy: FulmenChannel,
    *,
    address: Callable[[], str],
) -> Parts:
    """Opens all that works without a server; pushes what has to be closed onto the stack."""
    runs = open_runs(settings, stack, store, address=address)
    models = models_of(settings, runs.storage)
    compute = open_compute(settings, stack, store=store, proxy=proxy, ownership=runs.ownership, address=address)
    rank_tokens = RankTokens(store, folder=settings.state_dir / "rank-tokens", outage_limit_s=settings.outage_limit_s)
    connections = ServiceConnections(
        settings,
        store=store,
        proxy=proxy,
        engines=compute.engines,
        rank_tokens=rank_tokens,
        clusters=compute.clusters,
        modules=compute.modules,
        gpus=compute.gpus,
    )
    stack.callback(connections.close)
    await connections.isolator.report()
    trainers = trainers_of(settings, runs.storage, compute.local, connections=connections, models=models)
    return Parts(
        runs=runs,
        models=models,
        compute=compute,
        rank_tokens=rank_tokens,
        connections=connections,
        worker=worker_of(settings, runs, connections, models),
        trainers=trainers,
        used_by=users_of_models(models.store, runs.registry, trainers),
        address=address,
    )


def _export(metrics: Collector, stack: AsyncExitStack) -> None:
    """Exports metrics to Prometheus until the service stops."""
    REGISTRY.register(metrics)
    stack.callback(REGISTRY.unregister, metrics)
