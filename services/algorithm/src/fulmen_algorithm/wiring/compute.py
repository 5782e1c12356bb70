"""What runs compute on: the processes, GPUs and engines of this machine and of clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.clients.engine_tokens import EngineTokens
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.clusters import open_clusters
from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.gpus.machine import NvidiaSmi
from fulmen_algorithm.cluster.gpus.runs import RunGpus
from fulmen_algorithm.cluster.joined import JoinedMachines
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.connections import by_address
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.on_clusters import ClusterAccess, ClusterEngines
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.policy.served import ServedPolicies
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.tls import http_context

__all__ = ["ComputeParts", "open_compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeParts:
    """What runs compute on.

    Attributes:
        modules: Starts processes on this machine.
        local: This machine as a cluster, for groups of ranks.
        machines: Those that join a run by themselves.
        clusters: Every cluster by its name in the settings, this machine included.
        engines: The engines that serve policies.
        gpus: Which GPUs of this machine a run has.
    """

    modules: ModuleStarter
    local: LocalCluster
    machines: JoinedMachines
    clusters: Mapping[str, Cluster]
    engines: EnginePool
    gpus: RunGpus


def open_compute(
    settings: AlgorithmServiceSettings,
    stack: AsyncExitStack,
    *,
    store: FulmenChannel,
    proxy: FulmenChannel,
    ownership: RunOwnership,
    address: Callable[[], str],
) -> ComputeParts:
    """Creates what runs compute on; pushes what has to be closed onto the stack.

    Raises:
        StartupError: if a cluster needs a package that is not installed, or a certificate cannot be read.
    """
    modules = ModuleStarter(warm=settings.warm_start)
    stack.callback(modules.close)
    local, machines = LocalCluster(modules), JoinedMachines()
    clusters = _clusters(settings, local, machines, stack)
    access = ClusterAccess(
        clusters=clusters,
        tokens=EngineTokens(store, outage_limit_s=settings.outage_limit_s),
        agent_settings=lambda: settings.of_weight_agents(address()),
    )
    engines = EnginePool(
        _engine_options(settings),
        starter=EngineStarter(modules, in_process=settings.engine_in_process),
        on_clusters=ClusterEngines(access),
        proxy=proxy,
        backend_prefix=settings.engine_backend,
        file=ServedPolicies(settings.state_dir / "served.json"),
        max_engines=settings.max_engines,
        outage_limit_s=settings.outage_limit_s,
        still_serves=partial(ownership.serves, timeout_s=settings.run_lease_s),
    )
    return ComputeParts(
        modules=modules,
        local=local,
        machines=machines,
        clusters=clusters,
        engines=engines,
        gpus=RunGpus(NvidiaSmi(device=settings.device), device=settings.device),
    )


def _clusters(
    settings: AlgorithmServiceSettings, local: LocalCluster, machines: JoinedMachines, stack: AsyncExitStack
) -> Mapping[str, Cluster]:
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
