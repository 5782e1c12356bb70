"""Makes the hosts of containers and Jobs from the settings; part of the composition root."""

import asyncio
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.container.host import ContainerHost, container_environment
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.hosts import DOCKER_RUNTIME, RUNTIME_LABEL, Hosts
from fulmen_runner.agents.kubernetes.host import JobHost
from fulmen_runner.agents.kubernetes.verdict import Patience
from fulmen_runner.agents.ownership import Owner
from fulmen_runner.agents.python.children import ChildHost, ChildPolicy, Children
from fulmen_runner.agents.specification import Limits
from fulmen_runner.attempts.errors import HostUnavailable
from fulmen_runner.settings import RunnerSettings, split

DEFAULT_SOCKET = Path("/var/run/docker.sock")
OFF = "off"
IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"


def endpoints_of(settings: RunnerSettings) -> Endpoints:
    """Returns where agents on the runner's machine send model calls and spans."""
    return Endpoints(
        llm_proxy_url=settings.llm_proxy_url,
        otlp_url=settings.agents_otlp_url or store_url(settings),
        ca_file=settings.agents_ca_file,
        otlp_http_url=settings.agents_otlp_http_url,
        instrument=settings.instrument,
    )


def store_url(settings: RunnerSettings) -> str:
    """Returns the store's gRPC port as a URL."""
    return f"{'https' if settings.peer_tls() else 'http'}://{settings.store_target}"


def make_children(settings: RunnerSettings, guardian: Guardian, inherited: Mapping[str, str]) -> Children:
    """Makes what runs Python agents in processes of their own; none is started yet."""
    host = ChildHost(
        guardian=guardian,
        inherited=inherited,
        endpoints=endpoints_of(settings),
        flush_s=settings.flush_s,
        output_allowed_bytes=settings.max_command_output_bytes,
        limits=Limits(memory_bytes=settings.attempt_memory_bytes, process_count=settings.attempt_processes),
    )
    policy = ChildPolicy(
        attempts_each=settings.child_attempts, idle_count=settings.child_idle_count, idle_s=settings.child_idle_s
    )
    return Children(host=host, policy=policy)


def make_hosts(settings: RunnerSettings) -> Hosts:
    """Makes the hosts; none of them is connected yet."""
    endpoints = endpoints_of(settings)
    return Hosts(make_containers=lambda: _containers(settings, endpoints), make_jobs=lambda: _jobs(settings, endpoints))


def cluster_is_named(settings: RunnerSettings) -> bool:
    """Tells whether there seems to be a Kubernetes cluster, without asking it."""
    return bool(kubeconfig(settings) or os.environ.get(IN_CLUSTER_VARIABLE))


def kubeconfig(settings: RunnerSettings) -> str:
    """Returns the path of the kubeconfig, empty if there is none."""
    return settings.job_kubeconfig or os.environ.get("KUBECONFIG", "")


async def announced_labels(settings: RunnerSettings, hosts: Hosts) -> dict[str, str]:
    """Returns the runner's labels: those of the settings, and `runtime=docker` if an engine answers."""
    labels = settings.label_map()
    if RUNTIME_LABEL not in labels and engine_is_named(settings) and await hosts.has_engine():
        labels[RUNTIME_LABEL] = DOCKER_RUNTIME
    return labels


def engine_is_named(settings: RunnerSettings) -> bool:
    """Tells whether there seems to be a Docker engine, without asking it."""
    address = engine_address(settings)
    scheme, _, path = address.partition("://")
    return Path(path).is_socket() if scheme == "unix" else bool(address)


def engine_address(settings: RunnerSettings) -> str:
    """Returns where the Docker engine is, empty if there is to be none."""
    if settings.container_engine == OFF:
        return ""
    return settings.container_engine or os.environ.get("DOCKER_HOST", "") or f"unix://{DEFAULT_SOCKET}"


def _containers(settings: RunnerSettings, endpoints: Endpoints) -> ContainerHost:
    # Imported here: a runner without containers does without its client.
    from fulmen_runner.agents.container.docker_engine import DockerEngine

    address = engine_address(settings)
    if not address:
        raise HostUnavailable(
            "This runner runs no containers (FULMEN_RUNNER_CONTAINER_ENGINE=off): let rollouts of containers go to "
            "runners that do, with `runtime=docker` among their required labels."
        )
    tls = os.environ.get("DOCKER_TLS_VERIFY", "") not in ("", "0") and not address.startswith("unix://")
    certificates = Path(os.environ.get("DOCKER_CERT_PATH", "") or Path.home() / ".docker")
    reached = _reached(
        endpoints,
        llm_proxy_url=settings.container_llm_proxy_url,
        otlp_url=settings.container_otlp_url,
        otlp_http_url=settings.container_otlp_http_url,
    )
    return ContainerHost(
        engine=DockerEngine(address, tls_dir=certificates if tls else None),
        owner=Owner.this_process(settings.runner_host),
        endpoints=reached,
        inherited=container_environment(split(settings.inherit_environment), reached),
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


async def _jobs(settings: RunnerSettings, endpoints: Endpoints) -> JobHost:
    if not cluster_is_named(settings):
        raise HostUnavailable(
            "This runner knows no Kubernetes cluster: run it in one, or name a kubeconfig in "
            "FULMEN_RUNNER_JOB_KUBECONFIG; or let rollouts of Jobs go to runners that know one, by a label of theirs."
        )
    # Imported here, in a thread: a runner without Jobs does without it, and it takes about a second.
    kubernetes = await asyncio.to_thread(importlib.import_module, "fulmen_runner.agents.kubernetes.cluster")
    return JobHost(
        cluster=await kubernetes.connect(
            kubeconfig=kubeconfig(settings),
            context=settings.job_kube_context,
            namespace=settings.job_namespace,
            in_cluster=not kubeconfig(settings),
        ),
        owner=Owner.this_process(settings.runner_host),
        endpoints=_reached(
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


def _reached(endpoints: Endpoints, *, llm_proxy_url: str, otlp_url: str, otlp_http_url: str) -> Endpoints:
    """Returns the endpoints as agents elsewhere reach them; an empty address is that of agents on this machine."""
    # With the store at another address for them, its HTTP port is not where it is for others.
    same_store = endpoints.otlp_http_url if not otlp_url else ""
    return replace(
        endpoints,
        llm_proxy_url=llm_proxy_url or endpoints.llm_proxy_url,
        otlp_url=otlp_url or endpoints.otlp_url,
        otlp_http_url=otlp_http_url or same_store,
        ca_file="",  # a file of this machine; an image or a template brings its own
    )
