"""The program's parts and how they are joined."""

from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from fulmen.algorithm.v1 import rank_service_pb2 as pb
from fulmen.algorithm.v1.rank_service_pb2_grpc import RankServiceStub
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.forked_child import PRELOADED
from fulmen_algorithm.clients.membership import Membership
from fulmen_algorithm.cluster.local import own_resources
from fulmen_algorithm.rank_agent.agent import RankAgent
from fulmen_algorithm.rank_agent.settings import RankAgentSettings
from fulmen_algorithm.trainers.calls import build as own_build
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.forks import ForkServer
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher, run_of
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import ServiceSettings


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the program's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if its token names no run.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, RankAgentSettings):
        raise TypeError("fulmen-rank needs RankAgentSettings.")
    token, tls = HeldToken(settings.secret("token")), settings.peer_tls()
    run = run_of(token())
    if not run:
        raise StartupError("token names no training run. Issue one with `fulmen token issue --role rank --run RUN`.")
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token, tls=tls))
    algorithm = await stack.enter_async_context(open_channel(settings.algorithm_target, token=token, tls=tls))
    membership = Membership(outage_limit_s=settings.outage_limit_s)
    forks = ForkServer([PRELOADED]) if settings.warm_start else None
    if forks is not None:
        forks.start()
        stack.callback(forks.close)
    agent = RankAgent(
        ranks=RankServiceStub(algorithm),
        hello=_hello(settings, run),
        forks=forks,
        ca_file=settings.tls_ca_file,
        place=_place(settings, stack),
        membership=membership,
    )
    # Health and metrics alone.
    server = build_server(settings, verifier=TokenVerifier(""), service_names=(), register=lambda server: None)
    return ServiceParts(
        server=server,
        roles={"rank_agent": agent, "own_token": TokenRefresher(token, store)},
        stop_requested=membership.run_ended,
    )


def _place(settings: RankAgentSettings, stack: AsyncExitStack) -> Path:
    if settings.files_dir is None:
        return Path(stack.enter_context(TemporaryDirectory(prefix="fulmen-rank-", ignore_cleanup_errors=True)))
    settings.files_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return settings.files_dir


def _hello(settings: RankAgentSettings, run: str) -> pb.RanksHello:
    has = own_resources()
    return pb.RanksHello(
        training_run=run,
        node=settings.own_node,
        ranks=settings.ranks,
        gpus=settings.ranks if settings.device == "cuda" else 0,
        cpus=has.cpus or 1,
        memory_bytes=has.memory_bytes,
        build=own_build(),
    )
