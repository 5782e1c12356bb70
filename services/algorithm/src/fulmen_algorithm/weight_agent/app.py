"""The agent's parts and how they are joined."""

import ipaddress
from contextlib import AsyncExitStack

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1.engine_service_pb2_grpc import EngineServiceStub
from fulmen.algorithm.v1.weight_service_pb2 import DESCRIPTOR as WEIGHTS
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub, add_WeightServiceServicer_to_server
from fulmen.ids import parse_training_run_name
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.membership import Membership
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.engines.vllm import free_port
from fulmen_algorithm.weight_agent.agent import WeightAgent
from fulmen_algorithm.weight_agent.fetching import VersionFetcher
from fulmen_algorithm.weight_agent.held import HeldVersions
from fulmen_algorithm.weight_agent.servicer import PeerKey, PeerServicer
from fulmen_algorithm.weight_agent.settings import WeightAgentSettings
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher, run_of
from fulmen_service_kit.settings import ServiceSettings, is_loopback

WEIGHT_SERVICE = WEIGHTS.services_by_name["WeightService"].full_name


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the agent's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if its token names no run.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, WeightAgentSettings):
        raise TypeError("The weight agent needs WeightAgentSettings.")
    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    run = run_of(token())
    if not run:
        raise StartupError("token names no training run. Issue one with `fulmen token issue --role engine --run RUN`.")
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token, tls=tls))
    algorithm = await stack.enter_async_context(open_channel(settings.algorithm_target, token=token, tls=tls))
    modules = ModuleStarter(warm=False)
    stack.callback(modules.close)
    membership = Membership(outage_limit_s=settings.outage_limit_s)
    held, key = HeldVersions(), PeerKey(run)
    # One for the life of the agent: it is reported to the service once.
    settings = settings.model_copy(update={"engine_port": settings.engine_port or free_port(settings.engine_host)})
    server = build_server(
        settings,
        verifier=key,
        service_names=(WEIGHT_SERVICE,),
        register=lambda server: add_WeightServiceServicer_to_server(PeerServicer(held), server),
    )
    fetcher = VersionFetcher(
        WeightServiceStub(algorithm),
        settings.state_dir.absolute() / "versions",
        project=parse_training_run_name(run).project,
        held=held,
        peer_tls=tls,
    )
    stack.push_async_callback(fetcher.close)
    agent = WeightAgent(
        engines=EngineServiceStub(algorithm),
        hello=_hello(settings, run, server.port, key),
        options=_options(settings),
        starter=EngineStarter(modules),
        fetcher=fetcher,
        membership=membership,
    )
    return ServiceParts(
        server=server,
        roles={"weight_agent": agent, "own_token": TokenRefresher(token, store)},
        drain=agent.drain,
        stop_requested=membership.run_ended,
    )


def _hello(settings: WeightAgentSettings, run: str, port: int, key: PeerKey) -> pb.EngineHello:
    host = _in_addresses(settings.engine_advertise_host)
    hello = pb.EngineHello(
        training_run=run,
        engine_id=settings.own_engine_id,
        base_url=f"http://{host}:{settings.engine_port}/v1",
        requires_token=bool(settings.engine_token.get_secret_value()),
    )
    # One that listens to its own machine alone has nothing for others.
    if not is_loopback(settings.host) or is_loopback(settings.engine_advertise_host):
        hello.peer_target, hello.peer_key = f"{host}:{port}", key.text
    return hello


def _in_addresses(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def _options(settings: WeightAgentSettings) -> EngineOptions:
    return EngineOptions(
        host=settings.engine_host,
        advertise_host=settings.engine_advertise_host,
        port=settings.engine_port,
        token=settings.engine_token.get_secret_value(),
        torch_threads=settings.torch_threads,
        device=settings.device,
        max_batch_size=settings.engine_max_batch_size,
        log_folder=settings.state_dir / "engine",
        vllm_command=settings.vllm_command,
        vllm_start_deadline_s=settings.vllm_start_deadline_s,
        otlp_endpoint=settings.otlp_endpoint,
    )
