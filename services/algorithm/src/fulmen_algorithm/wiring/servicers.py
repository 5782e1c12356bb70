"""The servicers of the service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import grpc.aio

from fulmen.algorithm.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from fulmen.algorithm.v1.rank_service_pb2_grpc import add_RankServiceServicer_to_server
from fulmen.algorithm.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from fulmen.algorithm.v1.training_run_service_pb2_grpc import add_TrainingRunServiceServicer_to_server
from fulmen.algorithm.v1.weight_service_pb2_grpc import add_WeightServiceServicer_to_server
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_algorithm.cluster.joined import JoinedCluster
from fulmen_algorithm.cluster.joining import RunRanks
from fulmen_algorithm.connections import ServiceConnections, by_address
from fulmen_algorithm.engines.joining import RunEngines
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.loops.rules import RowLimits
from fulmen_algorithm.loops.trainers import Trainers
from fulmen_algorithm.models.transfers import Transfers
from fulmen_algorithm.models.version_weights import VersionWeights
from fulmen_algorithm.runs.creation.rules import CreationRules
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.transport.engines import EngineServicer
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.ranks import RankServicer
from fulmen_algorithm.transport.run_access import CallerRuns
from fulmen_algorithm.transport.trainers import TrainerServicer
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_algorithm.transport.weights import UsedBy, WeightServicer
from fulmen_algorithm.wiring.compute import ComputeParts
from fulmen_algorithm.wiring.models import ModelParts
from fulmen_algorithm.wiring.runs import RunParts, now
from fulmen_exchange.server.servicer import ExchangeLimits, GradientExchangeServicer, add_exchange
from fulmen_service_kit.security.project_limits import ProjectLimits

__all__ = ["Parts", "Servicers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What works without a server.

    Attributes:
        used_by: Finds the run or the trainer that needs a model.
        address: Returns the address at which other services reach this one.
    """

    runs: RunParts
    models: ModelParts
    compute: ComputeParts
    rank_tokens: RankTokens
    connections: ServiceConnections
    worker: RunWorker
    trainers: Trainers
    used_by: UsedBy
    address: Callable[[], str]


class Servicers:
    """The servicers."""

    def __init__(self, settings: AlgorithmServiceSettings, parts: Parts, stack: AsyncExitStack) -> None:
        """Creates the servicers; pushes what has to be closed onto the stack."""
        forwarding = Forwarding(settings.sibling_tls(), parts.address)
        self.runs = _runs(settings, parts, forwarding)
        self.weights = _weights(settings, parts, stack)
        self.engines = EngineServicer(
            RunEngines(parts.runs.registry, parts.compute.engines, fan_out=settings.engine_fan_out), forwarding
        )
        self.ranks = _ranks(settings, parts, forwarding)
        self.trainers = TrainerServicer(
            parts.trainers, RowLimits(max_rows=settings.max_trainer_rows, max_tokens=settings.max_trainer_tokens)
        )
        self.exchange = _exchange(settings, parts.runs.registry)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to a server."""
        add_WeightServiceServicer_to_server(self.weights, server)
        add_EngineServiceServicer_to_server(self.engines, server)
        add_RankServiceServicer_to_server(self.ranks, server)
        add_TrainerServiceServicer_to_server(self.trainers, server)
        add_TrainingRunServiceServicer_to_server(self.runs, server)
        add_exchange(self.exchange, server)

    def drain(self) -> None:
        """Ends what waits in calls, and refuses new work."""
        for each in (self.runs, self.weights, self.engines, self.ranks, self.exchange, self.trainers):
            each.drain()


def _runs(settings: AlgorithmServiceSettings, parts: Parts, forwarding: Forwarding) -> TrainingRunServicer:
    """Returns the servicer of runs, with the rules by which they are created."""
    clusters = settings.clusters
    rules = CreationRules(
        registry=parts.runs.algorithms,
        vllm_command=settings.vllm_command,
        external_engines=frozenset(by_address(settings.external_engines)),
        max_engines=settings.max_engines,
        endpoints=frozenset(by_address(settings.chat_endpoints)),
        exchange_targets=settings.known_exchange_targets,
        clusters=clusters.keys(),
        joined_clusters=[name for name, cluster in clusters.items() if cluster.kind == "joined"],
        ray_clusters=[name for name, cluster in clusters.items() if cluster.kind == "ray"],
        model_roots=parts.models.roots,
        models=parts.models.bases,
        is_taken=partial(_is_taken, parts.runs.registry, parts.compute.engines),
        device=settings.device,
        gpu_plan=parts.compute.gpus.plan,
        cluster_plan=parts.connections.cluster_plan,
    )
    return TrainingRunServicer(
        runs=parts.runs.registry,
        worker=parts.worker,
        connections=parts.connections,
        clock=now,
        rules=rules,
        ownership=parts.runs.ownership,
        forwarding=forwarding,
    )


async def _is_taken(runs: RunRegistry, engines: EnginePool, policy: str, project: str) -> bool:
    """Returns whether an unfinished run of another project trains a policy, or a route outside the project has its name."""
    return runs.trains_elsewhere(policy, project) or await engines.is_taken(policy, project)


def _weights(settings: AlgorithmServiceSettings, parts: Parts, stack: AsyncExitStack) -> WeightServicer:
    transfers = Transfers(ProjectLimits.configured(settings), max_open=settings.max_transfers)
    stack.callback(transfers.close)
    versions = VersionWeights(
        resources=parts.connections.resources_of,
        storage=parts.runs.storage,
        roots=parts.models.roots,
        rebuilt=settings.state_dir.absolute() / "rebuilt",
    )
    return WeightServicer(
        models=parts.models.store,
        uploads=parts.models.uploads,
        versions=versions,
        transfers=transfers,
        used_by=parts.used_by,
    )


def _ranks(settings: AlgorithmServiceSettings, parts: Parts, forwarding: Forwarding) -> RankServicer:
    clusters = parts.compute.clusters
    ranks = RunRanks(
        parts.runs.registry,
        parts.compute.machines,
        is_joined=lambda cluster: isinstance(clusters.get(cluster), JoinedCluster),
        silence_s=settings.cluster_silence_s,
    )
    return RankServicer(ranks, forwarding)


def _exchange(settings: AlgorithmServiceSettings, runs: RunRegistry) -> GradientExchangeServicer:
    folder = settings.exchange_folder or settings.state_dir / "exchange"
    return GradientExchangeServicer(
        runs=CallerRuns(runs),
        folder=None if settings.exchange_sums == "none" else folder,
        is_synced=settings.exchange_sums == "synced",
        limits=ExchangeLimits(
            max_shards=settings.exchange_max_shards,
            max_elements=settings.exchange_max_elements,
            max_held_bytes=settings.exchange_max_held_bytes,
            forget_s=settings.exchange_forget_s,
            keep_s=settings.exchange_keep_s,
        ),
    )
