"""Composition root of the runner: the one file that knows all its parts."""

from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path

from prometheus_client import REGISTRY

from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_runner.agents.bundles import UnpackedBundles
from fulmen_runner.agents.catalogue import Catalogue, Library
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.host import CommandHost
from fulmen_runner.agents.environment import (
    expanded_environment,
    inherited_environment,
    network_environment,
)
from fulmen_runner.agents.hosts import Hosts
from fulmen_runner.agents.judge import JudgeClient
from fulmen_runner.agents.library import StoreLibrary
from fulmen_runner.agents.own_directory import own_directory
from fulmen_runner.agents.python.host import PythonHost
from fulmen_runner.agents.python.preparation import prepare_process
from fulmen_runner.agents.specification import PythonTarget, Specification
from fulmen_runner.agents.tracing.command import startup_environment
from fulmen_runner.agents.tracing.exporter import RunnerExporter
from fulmen_runner.agents.tracing.spans import AttemptSpans
from fulmen_runner.attempts.captures import CaptureClient, ProxyCaptures
from fulmen_runner.attempts.drain import Drain
from fulmen_runner.attempts.executor import AttemptExecutor, Captures
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.attempts.session import LeaseSession
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.traces import traced
from fulmen_runner.attempts.workspace import Workspaces
from fulmen_runner.hook_wiring import make_hooks
from fulmen_runner.host_wiring import announced_labels, endpoints_of, make_children, make_hosts, store_url
from fulmen_runner.leases.guard import GuardedLease, LeaseGuard, end_process, store_dialler
from fulmen_runner.leases.stream import LeaseStream, RunnerIdentity
from fulmen_runner.metrics import RunnerMetrics
from fulmen_runner.servicer import RunnerServicer
from fulmen_runner.settings import RunnerSettings, split
from fulmen_runner.slots.keeper import SlotKeeper, SlotWitness
from fulmen_runner.slots.machine import LoadMeter, Machine
from fulmen_service_kit.auth import RolePolicy
from fulmen_service_kit.introspection import StoreVerifier
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.own_traces import own_traces
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import Role

VERSION = version("fulmen")
SERVICE_NAME = "fulmen.runner.v1.RunnerService"
POLICY = RolePolicy(
    services={SERVICE_NAME: frozenset({Role.SERVICE, Role.RUNNER})},
    rpcs={},
    audited={f"/{SERVICE_NAME}/Drain": (), f"/{SERVICE_NAME}/SetSlots": ("slot_count", "automatic")},
)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Makes the runner's parts."""
    assert isinstance(settings, RunnerSettings)  # The command line reads this class.
    token, tls = settings.secret("token"), settings.peer_tls()
    store = open_channel(settings.store_target, token=token, tls=tls)
    stack.push_async_callback(store.close)
    stragglers = Stragglers()
    control = settings.slot_control()
    witness = SlotWitness(control, _captures(settings, stack))
    hosts = make_hosts(settings)
    executor = wire_attempts(
        settings, stack, library=StoreLibrary(store), captures=witness, stragglers=stragglers, hosts=hosts
    )
    session = LeaseSession(slots=control.limit)
    execute, traces = witness.watched(executor.execute), own_traces()
    if traces is not None:
        execute = traced(execute, traces, host=settings.runner_host)
    pool = AttemptPool(session=session, execute=execute, stragglers=stragglers)
    identity = RunnerIdentity(
        host=settings.runner_host,
        version=VERSION,
        labels=await announced_labels(settings, hosts),
        projects=tuple(split(settings.projects)),
        address=lambda: settings.address(server.port),
    )
    load_meter = LoadMeter(Machine().measure)
    keeper = SlotKeeper(control=control, pool=pool, measured=lambda: load_meter.latest, configured=settings.most_slots)
    lease_stream = LeaseStream(channel=store, pool=pool, identity=identity, load=keeper.load)
    guard = LeaseGuard(
        dial=store_dialler(settings.store_target, tls),
        token=token,
        lease=lambda: GuardedLease(runner=session.runner, ttl_s=lease_stream.ttl_s),
        limit_s=settings.loop_blocked_limit_s,
        end=end_process,
    )
    collector = RunnerMetrics(pool, control, blocked_s=lambda: guard.blocked_s_total)
    REGISTRY.register(collector)
    stack.callback(REGISTRY.unregister, collector)
    drain = Drain(pool=pool, release_session=lease_stream.release_session, grace_s=settings.drain_grace_s)
    servicer = RunnerServicer(pool=pool, drain=drain, keeper=keeper, version=VERSION)
    server = build_server(
        settings,
        verifier=StoreVerifier(store),
        policy=POLICY,
        service_names=[SERVICE_NAME],
        register=lambda server: runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(servicer, server),
    )
    server.readiness.add("store", lambda: "" if lease_stream.is_open else "there is no session with it")
    return ServiceParts(
        server=server,
        roles={
            "lease_stream": lease_stream,
            "lease_guard": guard,
            "load_meter": load_meter,
            "slot_keeper": keeper,
            "hosts": hosts,
        },
        drain=drain.finish,
        stop_requested=drain.requested,
    )


def wire_attempts(
    settings: RunnerSettings,
    stack: AsyncExitStack,
    *,
    library: Library,
    captures: Captures,
    stragglers: Stragglers,
    hosts: Hosts | None = None,
) -> AttemptExecutor:
    """Makes what runs attempts, wherever they come from."""
    endpoints = endpoints_of(settings)
    hosts = hosts or make_hosts(settings)
    stack.push_async_callback(hosts.close)
    # Commands get what the runner was started with, not what in-process agents need.
    inherited = inherited_environment(split(settings.inherit_environment)) | network_environment(endpoints)
    prepare_process(endpoints)
    exporter = RunnerExporter(
        otlp_url=store_url(settings) if settings.peer_tls() else endpoints.otlp_url,
        token=settings.secret("token"),
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
    commands = CommandHost(
        guardian=guardian,
        inherited={**inherited, **startup_environment(settings.instrument, inherited)},
        work_dir=work_dir,
        output_allowed_bytes=settings.max_command_output_bytes,
        memory_bytes=settings.attempt_memory_bytes,
        process_count=settings.attempt_processes,
    )
    children = make_children(settings, guardian, inherited)
    stack.push_async_callback(children.close)
    judges = JudgeClient()
    stack.push_async_callback(judges.close)
    return AttemptExecutor(
        captures=captures,
        programs=_catalogue(
            settings,
            library,
            python=PythonHost(
                stragglers=stragglers,
                spans=spans,
                children=children,
                own_process=settings.isolation == "process",
            ),
            commands=commands,
            hosts=hosts,
            judges=judges,
        ),
        stragglers=stragglers,
        environment_of=endpoints.attempt_environment,
        expand_environment=expanded_environment,
        prompts_of=library.prompts,
        workspaces=workspaces,
        flush_spans=spans.flush,
        hooks=make_hooks(settings, stack, spans),
    )


def _captures(settings: RunnerSettings, stack: AsyncExitStack) -> CaptureClient:
    proxies = []
    for target in split(settings.llm_proxy_targets):
        proxy = ProxyCaptures(
            target=target, channel=open_channel(target, token=settings.secret("token"), tls=settings.peer_tls())
        )
        stack.push_async_callback(proxy.close)
        proxies.append(proxy)
    return CaptureClient(proxies=tuple(proxies), reach_s=settings.proxy_reach_s, flush_s=settings.flush_s)


def _catalogue(
    settings: RunnerSettings,
    library: Library,
    *,
    python: PythonHost,
    commands: CommandHost,
    hosts: Hosts,
    judges: JudgeClient,
) -> Catalogue:
    default = None
    if settings.agent:
        grader = PythonTarget(target=settings.grader) if settings.grader else None
        default = Specification(bundle="", entry=PythonTarget(target=settings.agent), grader=grader, environment={})
    return Catalogue(
        library=library,
        commands=commands,
        python=python,
        default=default,
        hosts=hosts,
        judges=judges,
        bundles=UnpackedBundles(work_dir=commands.work_dir),
    )
