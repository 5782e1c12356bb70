"""The executor of attempts and the hosts of agents, for the service and for offline runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from fulmen_runner.agents.bundles import UnpackedBundles
from fulmen_runner.agents.catalogue import Catalogue, Library
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.host import CommandHost
from fulmen_runner.agents.environment import (
    CA_VARIABLES,
    Endpoints,
    expanded_environment,
    inherited_environment,
    network_environment,
)
from fulmen_runner.agents.hosts import Hosts
from fulmen_runner.agents.isolation import SETTING, AgentIsolation
from fulmen_runner.agents.judge import JudgeClient
from fulmen_runner.agents.own_directory import own_directory
from fulmen_runner.agents.python.children import ChildHost, ChildPolicy, Children
from fulmen_runner.agents.python.host import PythonHost
from fulmen_runner.agents.python.preparation import prepare_process
from fulmen_runner.agents.specification import Limits, PythonTarget, Specification
from fulmen_runner.agents.tracing.command import startup_environment
from fulmen_runner.agents.tracing.export import RunnerExporter
from fulmen_runner.agents.tracing.span_counts import SpanCounts
from fulmen_runner.agents.tracing.spans import AttemptSpans
from fulmen_runner.agents.venvs.build import PackageSources, VenvBuilder
from fulmen_runner.agents.venvs.cache import VenvCache
from fulmen_runner.agents.venvs.modules import ModulePaths
from fulmen_runner.agents.venvs.venvs import Venvs
from fulmen_runner.attempts.executor import AttemptExecutor, Captures
from fulmen_runner.attempts.hooks import AttemptHooks, load_hooks
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.workspace import Workspaces
from fulmen_runner.metrics import HookMetrics
from fulmen_runner.settings import RunnerSettings, split
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation

__all__ = ["agent_endpoints", "agent_isolation", "build_executor", "export"]


def build_executor(
    settings: RunnerSettings,
    stack: AsyncExitStack,
    *,
    library: Library,
    captures: Captures,
    stragglers: Stragglers,
    hosts: Hosts | None = None,
    token: Callable[[], str] | None = None,
    isolation: AgentIsolation | None = None,
) -> AttemptExecutor:
    """Builds the executor of attempts, for the service and for offline runs."""
    endpoints = agent_endpoints(settings)
    prepare_process(endpoints)
    hosts = hosts or Hosts(settings, endpoints)
    stack.push_async_callback(hosts.close)
    spans = _spans(settings, endpoints, token)
    stack.push_async_callback(spans.close)
    work_dir = stack.enter_context(own_directory(Path(settings.work_dir) if settings.work_dir else None))
    workspaces = Workspaces(work_dir)
    stack.callback(workspaces.close)
    guardian = Guardian()
    stack.push_async_callback(guardian.close)
    processes = _Processes(
        settings=settings,
        guardian=guardian,
        # Variables of the runner's own environment, without those set for in-process agents.
        inherited=inherited_environment(split(settings.inherit_environment)) | network_environment(endpoints),
        isolation=isolation or agent_isolation(settings),
        work_dir=work_dir,
    )
    venvs, children = processes.venvs(), processes.children(endpoints)
    stack.push_async_callback(children.close)
    judges = JudgeClient()
    stack.push_async_callback(judges.close)
    programs = Catalogue(
        library=library,
        commands=processes.commands(),
        python=PythonHost(stragglers=stragglers, spans=spans, children=children),
        default=_default_agent(settings),
        hosts=hosts,
        judges=judges,
        bundles=UnpackedBundles(work_dir=work_dir),
        venvs=venvs,
    )
    return AttemptExecutor(
        captures=captures,
        programs=programs,
        stragglers=stragglers,
        environment_of=endpoints.attempt_environment,
        expand_environment=expanded_environment,
        workspaces=workspaces,
        flush_spans=spans.flush,
        hooks=_hooks(settings, stack, spans),
        printed_bytes=settings.printed_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processes:
    """What starts the processes of agents.

    Attributes:
        inherited: Variables of the runner's environment that the processes have.
        work_dir: Folder of what they need.
    """

    settings: RunnerSettings
    guardian: Guardian
    inherited: Mapping[str, str]
    isolation: AgentIsolation
    work_dir: Path

    def commands(self) -> CommandHost:
        """Returns the host of agents that are commands."""
        settings = self.settings
        return CommandHost(
            guardian=self.guardian,
            inherited={**self.inherited, **startup_environment(settings.instrument, self.inherited)},
            work_dir=self.work_dir,
            output_allowed_bytes=settings.max_command_output_bytes,
            memory_bytes=settings.attempt_memory_bytes,
            process_count=settings.attempt_processes,
            disk_bytes=settings.attempt_disk_bytes,
            isolation=self.isolation,
        )

    def children(self, endpoints: Endpoints) -> Children:
        """Returns the processes of Python agents."""
        settings = self.settings
        return Children(
            host=ChildHost(
                guardian=self.guardian,
                inherited=self.inherited,
                endpoints=endpoints,
                flush_s=settings.flush_s,
                output_allowed_bytes=settings.max_command_output_bytes,
                limits=Limits(memory_bytes=settings.attempt_memory_bytes, process_count=settings.attempt_processes),
                disk_bytes=settings.attempt_disk_bytes,
                isolation=self.isolation,
            ),
            policy=ChildPolicy(
                max_attempts=settings.child_attempts,
                max_idle=settings.child_idle_count,
                idle_timeout_s=settings.child_idle_s,
            ),
        )

    def venvs(self) -> Venvs:
        """Returns the virtual environments of agents."""
        settings = self.settings
        sources = PackageSources(
            index_url=settings.package_index_url.get_secret_value(),
            extra_index_urls=tuple(split(settings.package_extra_index_urls.get_secret_value())),
            folders=tuple(split(settings.package_folders)),
            allows_builds=settings.package_builds,
        )
        builder = VenvBuilder(
            guardian=self.guardian,
            isolation=self.isolation,
            inherited=self.inherited,
            sources=sources,
            build_s=settings.venv_build_s,
            venv_bytes=settings.venv_bytes,
            memory_bytes=settings.attempt_memory_bytes,
            process_count=settings.attempt_processes,
        )
        cache = VenvCache(
            folder=settings.venvs_folder, limit_bytes=settings.venvs_bytes, wait_s=2 * settings.venv_build_s
        )
        trusted = self.isolation.isolator.floor is Isolation.TRUSTED
        return Venvs(
            builder=builder,
            cache=cache,
            allowed=None if trusted else [Path(folder) for folder in split(settings.venv_folders)],
            modules=ModulePaths.made(self.work_dir),
        )


def agent_isolation(settings: RunnerSettings) -> AgentIsolation:
    """Returns the isolation of the runner's agents."""
    readable = [*split(settings.sandbox_readable), settings.agents_ca_file]
    readable += [os.environ.get(name, "") for name in CA_VARIABLES]
    # The default agent's file is the operator's, wherever it is.
    readable += [str(Path(each).parent) for each in (settings.agent, settings.grader) if Path(each).is_absolute()]
    isolator = Isolator(
        settings.isolation,
        setting=SETTING,
        readable=[Path(path) for path in readable if path],
        hidden=settings.private_files,
    )
    return AgentIsolation(isolator=isolator)


def agent_endpoints(settings: RunnerSettings) -> Endpoints:
    """Returns the endpoints of agents on the runner's machine."""
    return Endpoints(
        llm_proxy_url=settings.llm_proxy_url,
        otlp_url=settings.agents_otlp_url or _store_url(settings),
        ca_file=settings.agents_ca_file,
        otlp_http_url=settings.agents_otlp_http_url,
        instrument=settings.instrument,
    )


def _store_url(settings: RunnerSettings) -> str:
    """Returns the URL of the store's gRPC port."""
    return f"{'https' if settings.peer_tls() else 'http'}://{settings.store_target}"


def _spans(settings: RunnerSettings, endpoints: Endpoints, token: Callable[[], str] | None) -> AttemptSpans:
    exporter = RunnerExporter(
        otlp_url=_store_url(settings) if settings.peer_tls() else endpoints.otlp_url,
        token=token or settings.secret("token"),
        tls=settings.peer_tls(),
        timeout_s=settings.flush_s,
    )
    return AttemptSpans(exporter, flush_s=settings.flush_s)


def _default_agent(settings: RunnerSettings) -> Specification | None:
    if not settings.agent:
        return None
    grader = PythonTarget(target=settings.grader) if settings.grader else None
    return Specification(bundle="", entry=PythonTarget(target=settings.agent), grader=grader, environment={})


def _hooks(settings: RunnerSettings, stack: AsyncExitStack, spans: AttemptSpans) -> AttemptHooks | None:
    """Returns the configured hooks; None without any, so that attempts bear no cost."""
    targets = split(settings.hooks)
    if not targets:
        return None
    counts = SpanCounts()
    hooks = AttemptHooks(
        hooks=load_hooks(targets), timeout_s=settings.hook_timeout_s, spans=counts, flush_spans=spans.flush
    )
    spans.add_processor(counts)
    stack.push_async_callback(hooks.close)
    export(HookMetrics(hooks), stack)
    return hooks


def export(metrics: Collector, stack: AsyncExitStack) -> None:
    """Exports metrics to Prometheus until the stack is closed."""
    REGISTRY.register(metrics)
    stack.callback(REGISTRY.unregister, metrics)
