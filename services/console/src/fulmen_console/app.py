"""Wires the console: channels to the services, the gateway, sessions, and the two ports."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_console.gateway.access import Access
from fulmen_console.gateway.forwarding import Gateway, StreamLimits
from fulmen_console.gateway.methods import Target
from fulmen_console.settings import ConsoleSettings
from fulmen_console.sign_in.codes import SignInCodes
from fulmen_console.sign_in.sessions import Sessions
from fulmen_console.tinker.names import BaseNames
from fulmen_console.tinker.programs import Programs
from fulmen_console.transport.http_app import ConsoleApp
from fulmen_console.transport.page_app import PageApp
from fulmen_console.transport.services_app import ServicesApp
from fulmen_console.transport.session_app import SessionApp
from fulmen_console.transport.tinker_app import TinkerApp
from fulmen_service_kit.http.server import HttpServer, bind
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.auth import Authenticator
from fulmen_service_kit.security.keys import PublishedKeys
from fulmen_service_kit.security.revocation import follow_published_keys
from fulmen_service_kit.security.secret import SigningKeys
from fulmen_service_kit.security.token_buckets import TokenBuckets
from fulmen_service_kit.settings import ServiceSettings

__all__ = ["build"]


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the console; pushes its resources onto the stack.

    Raises:
        StartupError: If a port cannot be bound or a file of TLS is unusable.
    """
    assert isinstance(settings, ConsoleSettings)  # The command line reads this class.
    channels = _channels(settings, stack)
    published = PublishedKeys()
    followed = follow_published_keys(channels[Target.STORE], published)
    credentials = Authenticator(
        verifier=followed.verifier,
        dev_mode=settings.dev_mode,
        failures=TokenBuckets.per_minute(settings.auth_failures_per_minute),
    )
    sessions = Sessions(
        SigningKeys(settings.secret("session_key")),
        idle_s=settings.session_idle_s,
        max_s=settings.session_max_s,
        path=f"{settings.path_prefix}/",
        is_secure=settings.is_public_https or bool(settings.tls_certificate_file),
    )
    limits = StreamLimits(heartbeat_s=settings.heartbeat_s, limit_s=settings.stream_limit_s)
    session_app = SessionApp(credentials, sessions, SignInCodes())
    programs = Programs(BaseNames(settings.tinker_models))
    algorithm = channels.get(Target.ALGORITHM)
    app = ConsoleApp(
        gateway=Gateway(channels, access=Access(credentials, sessions), limits=limits),
        sessions=session_app,
        services=ServicesApp(channels, session_app.identify),
        tinker=None if algorithm is None else TinkerApp(programs, algorithm, credentials),
        page=PageApp(settings.path_prefix),
        path_prefix=settings.path_prefix,
    )
    http = HttpServer(
        app=app,
        listener=bind(settings.host, settings.http_port),
        grace_s=settings.drain_grace_s,
        tls=settings.own_tls(),
    )
    stack.callback(http.close)
    server = build_server(settings, verifier=followed.verifier, service_names=(), register=lambda _: None)
    server.readiness.add("keys", lambda: "" if published.is_known else "not loaded from the store yet")

    async def drain() -> None:
        limits.stopping.set()
        await http.drain()
        await programs.futures.close()

    return ServiceParts(
        server=server,
        roles={"http-server": http, "published-keys": followed.follower, "tinker-sessions": programs.sessions},
        drain=drain,
        ports={"http_port": http.port},
    )


def _channels(settings: ConsoleSettings, stack: AsyncExitStack) -> dict[Target, FulmenChannel]:
    """Opens channels without a token: each call has its caller's."""
    targets = {
        Target.STORE: settings.store_target,
        Target.LLM_PROXY: settings.llm_proxy_target,
        Target.ALGORITHM: settings.algorithm_target,
    }
    channels = {name: open_channel(target, tls=settings.peer_tls()) for name, target in targets.items() if target}
    for channel in channels.values():
        stack.push_async_callback(channel.close)
    return channels
