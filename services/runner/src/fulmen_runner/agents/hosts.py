"""Hosts of agents outside the runner's machine or process tree: a Docker engine, a Kubernetes cluster.

Invariant: the client of a host is imported and connected only if the host is configured or an agent needs it.
"""

import asyncio
import importlib
import importlib.util
import os
import time
from dataclasses import replace
from pathlib import Path

import structlog

from fulmen_runner.agents.container.host import ContainerHost, container_environment
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.kubernetes.host import JobHost
from fulmen_runner.agents.kubernetes.verdict import Patience
from fulmen_runner.agents.specification import Limits
from fulmen_runner.attempts.errors import HostUnavailable
from fulmen_runner.settings import RunnerSettings, split
from fulmen_service_kit.kubernetes.errors import KubernetesError
from fulmen_service_kit.ownership import Owner

REAP_INTERVAL_S = 60.0

RUNTIME_LABEL = "runtime"
DOCKER_RUNTIME = "docker"

DEFAULT_SOCKET = Path("/var/run/docker.sock")
OFF = "off"
IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"

_log = structlog.get_logger()


class Hosts:
    """The hosts of a runner, created on first use. Background role: removes leftovers of dead runners."""

    def __init__(self, settings: RunnerSettings, endpoints: Endpoints) -> None:
        """Initializes the hosts; `endpoints` are for agents on the runner's machine."""
        self._settings = settings
        self._endpoints = endpoints
        self._containers: ContainerHost | None = None
        self._jobs: JobHost | None = None
        self._connecting = asyncio.Lock()
        self._connected = asyncio.Event()
        self._unavailable: set[str] = set()

    async def announced_labels(self) -> dict[str, str]:
        """Returns the runner's labels: the configured ones, and `runtime=docker` if a Docker engine answers."""
        labels = self._settings.label_map()
        if RUNTIME_LABEL not in labels and _engine_is_configured(self._settings) and await self.has_engine():
            labels[RUNTIME_LABEL] = DOCKER_RUNTIME
        return labels

    async def containers(self) -> ContainerHost:
        """Returns the host of containers.

        Raises:
            HostUnavailable: If the client is not installed or no engine is configured.
        """
        if self._containers is None:
            require("aiodocker", extra="docker", what="containers")
            self._containers = _container_host(self._settings, self._endpoints)
            self._connected.set()
        return self._containers

    async def jobs(self) -> JobHost:
        """Returns the host of Jobs.

        Raises:
            HostUnavailable: If the client is not installed or no cluster is configured.
        """
        async with self._connecting:
            if self._jobs is None:
                require("kubernetes_asyncio", extra="kubernetes", what="Jobs")
                self._jobs = await _job_host(self._settings, self._endpoints)
                self._connected.set()
        return self._jobs

    async def has_engine(self) -> bool:
        """Returns True if a Docker engine answers."""
        try:
            await (await self.containers()).engine.check()
        except HostUnavailable as error:
            _log.debug("no_docker_engine", reason=str(error))
            return False
        return True

    async def run(self) -> None:
        """Removes leftovers when a host is connected and every minute, until cancelled."""
        while True:
            self._connected.clear()
            await self.remove_leftovers()
            try:
                async with asyncio.timeout(REAP_INTERVAL_S):
                    await self._connected.wait()
            except TimeoutError:
                continue

    async def remove_leftovers(self) -> None:
        """Removes leftovers of dead runners on the connected hosts."""
        hosts: dict[str, ContainerHost | JobHost | None] = {"docker": self._containers, "kubernetes": self._jobs}
        for name, host in hosts.items():
            if host is None:
                continue
            try:
                count = await host.remove_leftovers(time.time())
            except HostUnavailable as error:
                if name not in self._unavailable:
                    _log.warning("host_unavailable", host=name, reason=str(error))
                self._unavailable.add(name)
                continue
            self._unavailable.discard(name)
            if count:
                _log.info("leftovers_removed", host=name, count=count)

    async def close(self) -> None:
        """Closes the connections."""
        if self._containers is not None:
            await self._containers.engine.close()
        if self._jobs is not None:
            await self._jobs.close()


def require(module: str, *, extra: str, what: str) -> None:
    """Raises HostUnavailable if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise HostUnavailable(
            f"runner cannot run {what}: package {module} is not installed. Run `pip install fulmen-runner[{extra}]`."
        )


def _engine_is_configured(settings: RunnerSettings) -> bool:
    """Returns True if an engine is configured or its default socket exists."""
    address = _engine_address(settings)
    scheme, _, path = address.partition("://")
    return Path(path).is_socket() if scheme == "unix" else bool(address)


def _engine_address(settings: RunnerSettings) -> str:
    """Returns the address of the Docker engine, empty if it is switched off."""
    if settings.container_engine == OFF:
        return ""
    return settings.container_engine or os.environ.get("DOCKER_HOST", "") or f"unix://{DEFAULT_SOCKET}"


def _container_host(settings: RunnerSettings, endpoints: Endpoints) -> ContainerHost:
    # Deferred: the client is not needed by runners without containers.
    from fulmen_runner.agents.container.docker_engine import DockerEngine

    address = _engine_address(settings)
    if not address:
        raise HostUnavailable(
            "containers are disabled on this runner (FULMEN_RUNNER_CONTAINER_ENGINE=off). Require the label "
            "`runtime=docker` for rollouts of this agent."
        )
    tls = os.environ.get("DOCKER_TLS_VERIFY", "") not in ("", "0") and not address.startswith("unix://")
    certificates = Path(os.environ.get("DOCKER_CERT_PATH", "") or Path.home() / ".docker")
    reachable = _endpoints_elsewhere(
        endpoints,
        llm_proxy_url=settings.container_llm_proxy_url,
        otlp_url=settings.container_otlp_url,
        otlp_http_url=settings.container_otlp_http_url,
    )
    return ContainerHost(
        engine=DockerEngine(address, tls_dir=certificates if tls else None),
        owner=Owner.this_process(settings.runner_host),
        endpoints=reachable,
        inherited=container_environment(split(settings.inherit_environment), reachable),
        networks=split(settings.container_networks),
        pull=settings.container_pull,
        capabilities=split(settings.container_capabilities),
        read_only=settings.container_read_only,
        limits=Limits(
            memory_bytes=settings.container_memory_bytes,
            cpu_count=settings.container_cpu_count,
            process_count=settings.container_process_count,
        ),
        output_allowed_bytes=settings.max_command_output_bytes,
    )


async def _job_host(settings: RunnerSettings, endpoints: Endpoints) -> JobHost:
    kubeconfig = settings.job_kubeconfig or os.environ.get("KUBECONFIG", "")
    if not (kubeconfig or os.environ.get(IN_CLUSTER_VARIABLE)):
        raise HostUnavailable(
            "runner has no Kubernetes cluster. Run it inside a cluster, set FULMEN_RUNNER_JOB_KUBECONFIG, or require a "
            "label of runners that have one for rollouts of this agent."
        )
    # Deferred, and in a thread: the import takes about a second.
    kubernetes = await asyncio.to_thread(importlib.import_module, "fulmen_service_kit.kubernetes.client")
    try:
        cluster = await kubernetes.connect(
            kubeconfig=kubeconfig,
            context=settings.job_kube_context,
            namespace=settings.job_namespace,
            in_cluster=not kubeconfig,
        )
    except KubernetesError as error:
        raise HostUnavailable(str(error)) from None
    return JobHost(
        cluster=cluster,
        owner=Owner.this_process(settings.runner_host),
        endpoints=_endpoints_elsewhere(
            endpoints,
            llm_proxy_url=settings.job_llm_proxy_url,
            otlp_url=settings.job_otlp_url,
            otlp_http_url=settings.job_otlp_http_url,
        ),
        host_access=settings.job_host_access,
        limits=Limits(memory_bytes=settings.job_memory_bytes, cpu_count=settings.job_cpu_count),
        patience=Patience(start_s=settings.job_start_s, image_s=settings.job_image_s),
        ttl_s=settings.job_ttl_s,
        output_allowed_bytes=settings.max_command_output_bytes,
    )


def _endpoints_elsewhere(endpoints: Endpoints, *, llm_proxy_url: str, otlp_url: str, otlp_http_url: str) -> Endpoints:
    """Returns the endpoints for agents in containers or pods; an empty address stays the address for this machine's
    agents."""
    # If they reach the store at another address, its HTTP address differs as well.
    same_store = endpoints.otlp_http_url if not otlp_url else ""
    return replace(
        endpoints,
        llm_proxy_url=llm_proxy_url or endpoints.llm_proxy_url,
        otlp_url=otlp_url or endpoints.otlp_url,
        otlp_http_url=otlp_http_url or same_store,
        ca_file="",  # A file of this machine; the image or template has its own.
    )
