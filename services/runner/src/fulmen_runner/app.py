"""Composition root of the runner: what `wiring.executor` executes, under leases of the store."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.runner.v1 import runner_service_pb2_grpc
from fulmen_runner.agents.catalogue import Catalogue
from fulmen_runner.agents.hosts import Hosts
from fulmen_runner.agents.library import StoreLibrary
from fulmen_runner.agents.venvs.venvs import VenvMetrics
from fulmen_runner.attempts.captures import CaptureClient, ProxyCaptures
from fulmen_runner.attempts.drain import Drain
from fulmen_runner.attempts.executor import traced
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.attempts.progress import ProgressBoard
from fulmen_runner.attempts.session import LeaseSession
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.leases.guard import LeaseGuard, store_dialler
from fulmen_runner.leases.orders import Orders
from fulmen_runner.leases.stream import LeaseStream, RunnerIdentity
from fulmen_runner.metrics import RunnerMetrics
from fulmen_runner.servicer import RunnerServicer
from fulmen_runner.settings import AUTOMATIC, INITIAL_SLOTS, RunnerSettings, split
from fulmen_runner.slots.control import SlotControl, SlotPolicy
from fulmen_runner.slots.keeper import SlotKeeper, SlotMonitor
from fulmen_runner.slots.load import LoadMeter
from fulmen_runner.slots.machine import Machine
from fulmen_runner.wiring.executor import agent_endpoints, agent_isolation, build_executor, export
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.introspection import StoreVerifier
from fulmen_service_kit.settings import ServiceSettings

VERSION = version("fulmen")
SERVICE_NAMES = ("fulmen.runner.v1.RunnerService",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """The executor of attempts, and its concurrency."""

    pool: AttemptPool
    control: SlotControl
    hosts: Hosts
    progress: ProgressBoard
    isolator: Isolator


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the runner."""
    assert isinstance(settings, RunnerSettings)  # The command line reads this class.
    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    store = open_channel(settings.store_target, token=token, tls=tls)
    stack.push_async_callback(store.close)
    attempts = await _open_attempts(settings, stack, store, token)
    pool = attempts.pool

    # Leases and slots: how many attempts there are, and the store's view of them.
    meter = LoadMeter(Machine().measure)
    keeper = SlotKeeper(control=attempts.control, pool=pool, meter=meter, configured=settings.max_slots)
    identity = RunnerIdentity(
        host=settings.runner_host,
        version=VERSION,
        labels=await attempts.hosts.announced_labels(),
        projects=tuple(split(settings.projects)),
        address=lambda: settings.address(server.port),
    )
    lease_stream = LeaseStream(
        channel=store, pool=pool, identity=identity, keeper=keeper, progress=attempts.progress, orders=lambda: orders
    )
    dial = store_dialler(settings.store_target, tls)
    guard = LeaseGuard(lease_stream, dial=dial, token=token, limit_s=settings.loop_blocked_limit_s)
    drain = Drain(pool=pool, release_session=lease_stream.release_session, grace_s=settings.drain_grace_s)
    orders = Orders(pool=pool, keeper=keeper, drain=drain)
    export(RunnerMetrics(pool, attempts.control, guard), stack)

    # The runner's own rpcs.
    servicer = RunnerServicer(pool=pool, drain=drain, keeper=keeper, isolator=attempts.isolator, version=VERSION)
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
            "progress": attempts.progress,
            "hosts": attempts.hosts,
            "own_token": TokenRefresher(token, store),
        },
        drain=drain.finish,
        stop_requested=drain.requested,
    )


async def _open_attempts(
    settings: RunnerSettings, stack: AsyncExitStack, store: FulmenChannel, token: HeldToken
) -> _Attempts:
    """Creates what leads from an assignment to an outcome; pushes what has to be closed onto the stack."""
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
    export(VenvMetrics(executor.programs.venvs), stack)
    execute, traces = monitor.observed(executor.execute), own_traces()
    if traces is not None:
        execute = traced(execute, traces, host=settings.runner_host)
    session = LeaseSession(slots=control.limit)
    return _Attempts(
        pool=AttemptPool(session=session, execute=execute, stragglers=stragglers),
        control=control,
        hosts=hosts,
        progress=executor.progress,
        isolator=isolation.isolator,
    )


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
