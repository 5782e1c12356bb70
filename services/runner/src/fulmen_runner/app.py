"""Composition root of the runner: the one module that knows all parts."""

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2_grpc
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
from fulmen_runner.agents.library import StoreLibrary
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
from fulmen_runner.agents.venvs.venvs import VenvMetrics, Venvs
from fulmen_runner.attempts.captures import CaptureClient, ProxyCaptures
from fulmen_runner.attempts.drain import Drain
from fulmen_runner.attempts.executor import AttemptExecutor, Captures, traced
from fulmen_runner.attempts.hooks import AttemptHooks, load_hooks
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.attempts.session import LeaseSession
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.workspace import Workspaces
from fulmen_runner.leases.guard import LeaseGuard, store_dialler
from fulmen_runner.leases.orders import Orders
from fulmen_runner.leases.stream import LeaseStream, RunnerIdentity
from fulmen_runner.metrics import HookMetrics, RunnerMetrics
from fulmen_runner.servicer import RunnerServicer
from fulmen_runner.settings import AUTOMATIC, INITIAL_SLOTS, RunnerSettings, split
from fulmen_runner.slots.control import SlotControl, SlotPolicy
from fulmen_runner.slots.keeper import SlotKeeper, SlotMonitor
from fulmen_runner.slots.load import LoadMeter
from fulmen_runner.slots.machine import Machine
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.introspection import StoreVerifier
from fulmen_service_kit.settings import ServiceSettings

VERSION = version("fulmen")
SERVICE_NAMES = ("fulmen.runner.v1.RunnerService",)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the runner."""
    assert isinstance(settings, RunnerSettings)  # The command line reads this class.
    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    store = open_channel(settings.store_target, token=token, tls=tls)
    stack.push_async_callback(store.close)

    # Attempts: from an assignment to an outcome.
    stragglers = Stragglers()
    control = _slot_control(settings)
    monitor = SlotMonitor(control, _captures(settings, token, stack))
    hosts = Hosts(settings, agent_endpoints(settings))
    isolation = agent_isolation(settings)
    await isolation.isolator.report()
    executor = build_executor(
        settings,
        stack,
        library=StoreLibrary(store),
        captures=monitor,
        stragglers=stragglers,
        hosts=hosts,
        token=token,
        isolation=isolation,
    )
    assert isinstance(executor.programs, Catalogue)
    _register(stack, VenvMetrics(executor.programs.venvs))
    execute, traces = monitor.observed(executor.execute), own_traces()
    if traces is not None:
        execute = traced(execute, traces, host=settings.runner_host)
    session = LeaseSession(slots=control.limit)
    pool = AttemptPool(session=session, execute=execute, stragglers=stragglers)

    # Leases and slots: how many attempts there are, and the store's view of them.
    meter = LoadMeter(Machine().measure)
    keeper = SlotKeeper(control=control, pool=pool, meter=meter, configured=settings.max_slots)
    identity = RunnerIdentity(
        host=settings.runner_host,
        version=VERSION,
        labels=await hosts.announced_labels(),
        projects=tuple(split(settings.projects)),
        address=lambda: settings.address(server.port),
    )
    lease_stream = LeaseStream(
        channel=store, pool=pool, identity=identity, keeper=keeper, progress=executor.progress, orders=lambda: orders
    )
    dial = store_dialler(settings.store_target, tls)
    guard = LeaseGuard(lease_stream, dial=dial, token=token, limit_s=settings.loop_blocked_limit_s)
    drain = Drain(pool=pool, release_session=lease_stream.release_session, grace_s=settings.drain_grace_s)
    orders = Orders(pool=pool, keeper=keeper, drain=drain)
    _register(stack, RunnerMetrics(pool, control, guard))

    # The runner's own rpcs.
    servicer = RunnerServicer(pool=pool, drain=drain, keeper=keeper, isolator=isolation.isolator, version=VERSION)
    server = build_server(
        settings,
        verifier=StoreVerifier(store),
        service_names=SERVICE_NAMES,
        register=lambda server: runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(servicer, server),
    )
    server.readiness.add("store", lambda: "" if lease_stream.is_open else "no session is open")
    return ServiceParts(
        server=server,
        roles={
            "lease_stream": lease_stream,
            "lease_guard": guard,
            "load_meter": meter,
            "slot_keeper": keeper,
            "progress": executor.progress,
            "hosts": hosts,
            "own_token": TokenRefresher(token, store),
        },
        drain=drain.finish,
        stop_requested=drain.requested,
    )


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
    exporter = RunnerExporter(
        otlp_url=store_url(settings) if settings.peer_tls() else endpoints.otlp_url,
        token=token or settings.secret("token"),
        tls=settings.peer_tls(),
        timeout_s=settings.flush_s,
    )
    spans = AttemptSpans(exporter, flush_s=settings.flush_s)
    stack.push_async_callback(spans.close)
    work_dir = stack.enter_context(own_directory(Path(settings.work_dir) if settings.work_dir else None))
    workspaces = Workspaces(work_dir)
    stack.callback(workspaces.close)
    guardian = Guardian()
    stack.push_async_callback(guardian.close)
    isolation = isolation or agent_isolation(settings)
    # Variables of the runner's own environment, without those set for in-process agents.
    inherited = inherited_environment(split(settings.inherit_environment)) | network_environment(endpoints)
    venvs = _venvs(settings, guardian, inherited, isolation, work_dir)
    children = _children(settings, guardian, inherited, isolation)
    stack.push_async_callback(children.close)
    judges = JudgeClient()
    stack.push_async_callback(judges.close)
    programs = Catalogue(
        library=library,
        commands=CommandHost(
            guardian=guardian,
            inherited={**inherited, **startup_environment(settings.instrument, inherited)},
            work_dir=work_dir,
            output_allowed_bytes=settings.max_command_output_bytes,
            memory_bytes=settings.attempt_memory_bytes,
            process_count=settings.attempt_processes,
            disk_bytes=settings.attempt_disk_bytes,
            isolation=isolation,
        ),
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


def _venvs(
    settings: RunnerSettings,
    guardian: Guardian,
    inherited: Mapping[str, str],
    isolation: AgentIsolation,
    work_dir: Path,
) -> Venvs:
    sources = PackageSources(
        index_url=settings.package_index_url.get_secret_value(),
        extra_index_urls=tuple(split(settings.package_extra_index_urls.get_secret_value())),
        folders=tuple(split(settings.package_folders)),
        allows_builds=settings.package_builds,
    )
    builder = VenvBuilder(
        guardian=guardian,
        isolation=isolation,
        inherited=inherited,
        sources=sources,
        build_s=settings.venv_build_s,
        venv_bytes=settings.venv_bytes,
        memory_bytes=settings.attempt_memory_bytes,
        process_count=settings.attempt_processes,
    )
    trusted = isolation.isolator.floor is Isolation.TRUSTED
    return Venvs(
        builder=builder,
        cache=VenvCache(
            folder=settings.venvs_folder, limit_bytes=settings.venvs_bytes, wait_s=2 * settings.venv_build_s
        ),
        allowed=None if trusted else [Path(folder) for folder in split(settings.venv_folders)],
        modules=ModulePaths.made(work_dir),
    )


def _children(
    settings: RunnerSettings, guardian: Guardian, inherited: Mapping[str, str], isolation: AgentIsolation
) -> Children:
    return Children(
        host=ChildHost(
            guardian=guardian,
            inherited=inherited,
            endpoints=agent_endpoints(settings),
            flush_s=settings.flush_s,
            output_allowed_bytes=settings.max_command_output_bytes,
            limits=Limits(memory_bytes=settings.attempt_memory_bytes, process_count=settings.attempt_processes),
            disk_bytes=settings.attempt_disk_bytes,
            isolation=isolation,
        ),
        policy=ChildPolicy(
            max_attempts=settings.child_attempts,
            max_idle=settings.child_idle_count,
            idle_timeout_s=settings.child_idle_s,
        ),
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
        otlp_url=settings.agents_otlp_url or store_url(settings),
        ca_file=settings.agents_ca_file,
        otlp_http_url=settings.agents_otlp_http_url,
        instrument=settings.instrument,
    )


def store_url(settings: RunnerSettings) -> str:
    """Returns the URL of the store's gRPC port."""
    return f"{'https' if settings.peer_tls() else 'http'}://{settings.store_target}"


def _captures(settings: RunnerSettings, token: HeldToken, stack: AsyncExitStack) -> CaptureClient:
    proxies = []
    for target in split(settings.llm_proxy_targets):
        proxy = ProxyCaptures(target=target, channel=open_channel(target, token=token, tls=settings.peer_tls()))
        stack.push_async_callback(proxy.close)
        proxies.append(proxy)
    return CaptureClient(proxies=tuple(proxies), reach_s=settings.proxy_reach_s, flush_s=settings.flush_s)


def _slot_control(settings: RunnerSettings) -> SlotControl:
    return SlotControl(
        policy=SlotPolicy(
            min_slots=settings.slots_min, max_slots=settings.slots_max, memory_share=settings.slots_memory_share
        ),
        limit=INITIAL_SLOTS if settings.slots == AUTOMATIC else settings.slots,
        automatic=settings.slots == AUTOMATIC,
    )


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
    _register(stack, HookMetrics(hooks))
    return hooks


def _register(stack: AsyncExitStack, collector: Collector) -> None:
    REGISTRY.register(collector)
    stack.callback(REGISTRY.unregister, collector)
