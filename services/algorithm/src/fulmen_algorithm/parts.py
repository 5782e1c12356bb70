"""Parts of the service that are made from its settings."""

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.algorithms.registry import AlgorithmsInvalid, load_registry
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.hub import HubLimits, HubModels
from fulmen_algorithm.cluster.clusters import open_clusters
from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.joined import JoinedMachines
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.connections import by_address
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.on_clusters import ClusterEngines
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.loops.processes import LoopProcesses
from fulmen_algorithm.loops.publication import Publisher
from fulmen_algorithm.loops.trainers import TrainerLimits, Trainers
from fulmen_algorithm.models.bases import BaseModels
from fulmen_algorithm.models.uploads import UploadLimits
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.first_weights import WeightSources
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.algorithm import Registry
from fulmen_algorithm.runs.creation.rules import CreationRules, IsTaken
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.sinks.sink import OpenSink, load_sink
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.transport.run_access import CallerRuns
from fulmen_exchange.server.servicer import ExchangeLimits, GradientExchangeServicer
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.tls import http_context


def clusters_of(
    settings: AlgorithmServiceSettings, local: LocalCluster, machines: JoinedMachines, stack: AsyncExitStack
) -> Mapping[str, Cluster]:
    """Returns the clusters of the settings.

    Raises:
        StartupError: if one needs a package that is not installed, or a certificate cannot be read.
    """
    own = settings.own_tls()
    gate = Gate(
        GateOptions(
            host=settings.cluster_host,
            port=settings.cluster_port,
            advertise_host=settings.cluster_advertise_host,
            # Without client certificates: processes prove that they know their group's secret.
            tls=None if own is None else http_context(own),
            ca_file="" if own is None else settings.tls_ca_file,
            server_name=settings.tls_own_name,
            silence_s=settings.cluster_silence_s,
        )
    )
    stack.callback(gate.close)
    try:
        return open_clusters(settings.clusters, local, gate, machines)
    except ImportError as error:
        raise StartupError(f"A cluster of FULMEN_ALGORITHM_CLUSTERS needs a package: {error}.") from None


def algorithms_of(settings: AlgorithmServiceSettings) -> Registry:
    """Loads the algorithms.

    Raises:
        StartupError: if one cannot be loaded.
    """
    files = [Path(file).expanduser() for file in settings.modules.split(os.pathsep) if file]
    try:
        return load_registry(files)
    except AlgorithmsInvalid as error:
        raise StartupError(f"{error}.") from error


def exchange_of(settings: AlgorithmServiceSettings, runs: RunRegistry) -> GradientExchangeServicer:
    """Returns the servicer of gradient exchanges."""
    return GradientExchangeServicer(
        runs=CallerRuns(runs),
        folder=None
        if settings.exchange_sums == "none"
        else settings.exchange_folder or settings.state_dir / "exchange",
        is_synced=settings.exchange_sums == "synced",
        limits=ExchangeLimits(
            max_shards=settings.exchange_max_shards,
            max_elements=settings.exchange_max_elements,
            max_held_bytes=settings.exchange_max_held_bytes,
            forget_s=settings.exchange_forget_s,
            keep_s=settings.exchange_keep_s,
        ),
    )


def trainers_of(
    settings: AlgorithmServiceSettings,
    storage: RunStorage,
    options: GroupOptions,
    *,
    sources: Callable[[str], WeightSources],
) -> Trainers:
    """Returns the trainers of loops outside of the service."""
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


def sinks_of(settings: AlgorithmServiceSettings) -> dict[str, OpenSink]:
    """Returns the metric sinks, by name.

    Raises:
        StartupError: if one needs a package that is not installed.
    """
    sinks: dict[str, OpenSink] = {}
    for name in filter(None, (part.strip() for part in settings.metric_sinks.split(","))):
        try:
            sinks[name] = load_sink(name)
        except ImportError:
            raise StartupError(f"The metric sink {name!r} needs `pip install 'fulmen-algorithm[{name}]'`.") from None
    return sinks


def engines_of(
    settings: AlgorithmServiceSettings,
    modules: ModuleStarter,
    proxy: FulmenChannel,
    ownership: RunOwnership,
    on_clusters: ClusterEngines,
) -> EnginePool:
    """Returns the engines of this service."""
    return EnginePool(
        _engine_options(settings),
        starter=EngineStarter(modules, in_process=settings.engine_in_process),
        on_clusters=on_clusters,
        proxy=proxy,
        backend_prefix=settings.engine_backend,
        file=ServedPolicies(settings.state_dir / "served.json"),
        max_engines=settings.max_engines,
        outage_limit_s=settings.outage_limit_s,
        still_serves=partial(ownership.serves, timeout_s=settings.run_lease_s),
    )


def hub_of(settings: AlgorithmServiceSettings) -> HubModels:
    """Returns the models of the hub."""
    return HubModels(
        settings.hub_models,
        HubLimits(max_bytes=settings.hub_max_bytes, deadline_s=settings.hub_deadline_s),
        variables={"HF_HOME": settings.hub_cache, "HF_TOKEN": settings.hub_token.get_secret_value()},
    )


def upload_limits_of(settings: AlgorithmServiceSettings) -> UploadLimits:
    """Returns the limits of uploads."""
    return UploadLimits(
        max_bytes=settings.upload_max_bytes,
        quota_bytes=settings.upload_quota_bytes,
        idle_s=settings.upload_idle_s,
        keep_s=settings.upload_keep_s,
    )


def rules_of(
    settings: AlgorithmServiceSettings,
    algorithms: Registry,
    roots: ModelRoots,
    models: BaseModels,
    *,
    is_taken: IsTaken,
) -> CreationRules:
    """Returns the rules by which runs are created."""
    return CreationRules(
        registry=algorithms,
        vllm_command=settings.vllm_command,
        external_engines=frozenset(by_address(settings.external_engines)),
        max_engines=settings.max_engines,
        endpoints=frozenset(by_address(settings.chat_endpoints)),
        exchange_targets=settings.known_exchange_targets,
        clusters=settings.clusters.keys(),
        joined_clusters=[name for name, cluster in settings.clusters.items() if cluster.kind == "joined"],
        ray_clusters=[name for name, cluster in settings.clusters.items() if cluster.kind == "ray"],
        model_roots=roots,
        models=models,
        is_taken=is_taken,
        device=settings.device,
    )


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
