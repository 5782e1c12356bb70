"""A running stack with something of everything in it, and a hostile backend behind its proxy."""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from fulmen.algorithm.v1 import gradient_exchange_service_pb2, training_run_service_pb2
from fulmen.ids import runner_name
from fulmen.llm_proxy.v1 import (
    backend_pb2,
    backend_service_pb2,
    backend_service_pb2_grpc,
    route_pb2,
    route_service_pb2,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2
from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_pb2
from fulmen_cli.local.credentials import issue_token
from fulmen_cli.local.stack import LocalStack, StackSettings
from fulmen_llm_proxy.apis.api import ApiName
from tests.fuzz.targets.answers import WAYS
from tests.support.llm_proxy.rogue_backend import Peer, RogueBackend, serve_well
from tests.support.store.rpcs import Rpc, listed_rpcs
from tests.support.store.running import Runner, Stubs, create, create_project

__all__ = ["LiveTarget", "LiveWorld", "furnish", "live_world", "tokens_of"]

DESCRIBED = (gradient_exchange_service_pb2, training_run_service_pb2, runner_service_pb2)
"""Services whose descriptors nothing else here imports."""

SECRET = "only-b-knows"
ATTEMPTS = 8
ATTEMPT_LIMIT_S = 86_400
"""The longest that there is: a key ends with its attempt, and whoever it refuses tries nothing."""
_ALWAYS = ("store", "llm_proxy")
SERVICES = ("store", "llm_proxy", "algorithm", "runner-1")
ROLES = ("admin", "service", "runner", "client", "reader")
_CALL = re.compile(rb"fuzz-call-(\d+)")
_APIS = {
    ApiName.CHAT: backend_pb2.API_CHAT_COMPLETIONS, ApiName.COMPLETIONS: backend_pb2.API_COMPLETIONS,
    ApiName.RESPONSES: backend_pb2.API_RESPONSES, ApiName.EMBEDDINGS: backend_pb2.API_EMBEDDINGS,
    ApiName.MESSAGES: backend_pb2.API_MESSAGES, ApiName.COUNT_TOKENS: backend_pb2.API_COUNT_TOKENS,
}  # fmt: skip
_ENGINES = {
    "unknown": backend_pb2.ENGINE_UNSPECIFIED,
    "sglang": backend_pb2.ENGINE_SGLANG,
    "vllm": backend_pb2.ENGINE_VLLM,
}
_ENVIRONMENT = {
    f"FULMEN_{service}_AUTH_FAILURES_PER_MINUTE": "0" for service in ("STORE", "LLM_PROXY", "ALGORITHM", "RUNNER")
} | {
    "FULMEN_STORE_LEASE_TTL_S": "3600",
    "FULMEN_LLM_PROXY_RETRY_DEADLINE_S": "0",
    "FULMEN_LLM_PROXY_FIRST_BYTE_TIMEOUT_S": "2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """Services that are called with an input; `send` raises what is a finding.

    Attributes:
        services: The services whose memory is watched.
        workers: Inputs in flight at once.
    """

    seeds: Callable[[LiveWorld], Sequence[bytes]]
    mutate: Callable[[LiveWorld, bytes, random.Random], bytes]
    send: Callable[[LiveWorld, bytes], Any]
    services: Sequence[str]
    workers: int = 16


@dataclass(slots=True, kw_only=True)
class LiveWorld:
    """What targets call.

    Attributes:
        stack: The stack; None if a test runs services of its own.
        ports: Where the services listen, by the names of a stack.
        names: Names of what exists, for texts of messages.
        keys: Keys of attempts that run.
        answers: What the backend sends to a call, by its number.
    """

    stack: _Stack | None = None
    http: aiohttp.ClientSession
    ports: dict[str, int]
    backend: RogueBackend | None = None
    rpcs: dict[str, tuple[grpc.aio.Channel, Rpc]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    answers: dict[int, tuple[bool, bytes]] = field(default_factory=dict)
    calls: Any = field(default_factory=itertools.count)

    def pid(self, service: str) -> int:
        """Returns the process of a service."""
        assert self.stack is not None
        return self.stack.process(service).pid

    def log_tail(self, service: str) -> str:
        """Returns the last lines of a service's log."""
        assert self.stack is not None
        return self.stack.log_tail(service)

    def crashed(self) -> list[str]:
        """Returns the services that have ended."""
        return (
            []
            if self.stack is None
            else [name for name in self.stack.started if self.stack.process(name).exit_status is not None]
        )

    async def act(self, peer: Peer) -> bool:
        """Answers as the fuzzer says; well if the call is not one of its own."""
        found = _CALL.search(peer.asked.body)
        stream, answer = self.answers.get(int(found[1]), (False, b"")) if found else (False, b"")
        if not answer:
            return await serve_well(peer)
        kind = b"text/event-stream" if stream else b"application/json"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(answer))
        await peer.send(head + answer)
        return True


@asynccontextmanager
async def live_world(services: Collection[str]) -> AsyncIterator[LiveWorld]:
    """Runs services as processes of their own: those that are named, and always a store and a proxy."""
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="fz", dir="/tmp")))
        backend = await exits.enter_async_context(RogueBackend())
        stack = await exits.enter_async_context(_running(folder / "s", services))
        connector = aiohttp.TCPConnector(limit=0)
        http = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        world = LiveWorld(stack=stack, http=http, backend=backend, ports=stack.folder.last_ports())
        backend.act = world.act
        world.tokens = tokens_of((stack.folder.path / "signing.key").read_text().strip())
        for name in stack.started:
            target = f"127.0.0.1:{world.ports[name]}"
            channel = await exits.enter_async_context(grpc.aio.insecure_channel(target))
            world.rpcs |= {path: (channel, rpc) for path, rpc in (await listed_rpcs(channel)).items()}
        store = f"127.0.0.1:{world.ports['store']}"
        await furnish(world, Stubs(await exits.enter_async_context(open_channel(store, token=stack.client_token))))
        await _make_routes(world, stack.client_token)
        yield world


class _Stack(LocalStack):
    """A stack that knows which of its services were started."""

    started: Sequence[str] = ()


@asynccontextmanager
async def _running(folder: Path, services: Collection[str]) -> AsyncIterator[_Stack]:
    """Starts a database and services; stops them in the end."""
    stack = _Stack(StackSettings(state_dir=folder, use_default_ports=False, environment=dict(_ENVIRONMENT)))
    stack.folder.create()
    stack.started = [name for name in SERVICES if name in {*_ALWAYS, *services}]
    try:
        await stack.prepare()
        for name in stack.started:
            await stack.start_service(name)
        yield stack
    finally:
        await stack.stop()


def tokens_of(signing_key: str) -> dict[str, str]:
    """Returns a token of each role for project a."""
    return {role: issue_token(signing_key, role, subject="fuzz", ttl_s=86_400, project="projects/a") for role in ROLES}


async def furnish(world: LiveWorld, admin: Stubs) -> None:
    """Creates rollouts, resources and running attempts in projects a and b."""
    world.names += ["projects/default", "projects/*", "projects/default/rollouts/", "resources/x", "latest"]
    labels = {"only": "fuzz"}
    policy = rollout_pb2.RolloutPolicy()
    policy.attempt_timeout.FromSeconds(ATTEMPT_LIMIT_S)
    for project in ("projects/a", "projects/b"):
        await create_project(admin, project)
        secret = SECRET.encode() if project[-1] == "b" else b"a"
        asked = {"project": project, "input": secret, "required_labels": labels, "policy": policy}
        created = await create(admin, ATTEMPTS, **asked)
        runner = await Runner(admin).open(labels=labels)
        assignments = await runner.take(ATTEMPTS)
        version = resource_pb2.ResourceVersion(name="resources/x", kind="bundle", project=project, content=secret)
        await admin.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
        world.names += [project, *created[:2], runner_name(runner.session_id), "resources/x/versions/1"]
        if project[-1] == "a":
            world.keys = [each.attempt_key for each in assignments]
            world.attempts = [each.attempt for each in assignments]
            world.names += world.attempts[:2]


async def _make_routes(world: LiveWorld, token: str) -> None:
    """Registers the hostile backend once for each API and engine, with a trainable route each."""
    assert world.backend is not None
    async with open_channel(f"127.0.0.1:{world.ports['llm_proxy']}", token=token) as channel:
        backends = backend_service_pb2_grpc.BackendServiceStub(channel)
        routes = route_service_pb2_grpc.RouteServiceStub(channel)
        for served in sorted({served for _, served in WAYS}):
            for name, engine in _ENGINES.items():
                dialect = backend_pb2.DIALECT_ANTHROPIC if served in (ApiName.MESSAGES, ApiName.COUNT_TOKENS) else 0
                backend = backend_pb2.Backend(
                    name=f"backends/{served}-{name}", base_url=world.backend.url, apis=[_APIS[served]], engine=engine,
                    returns_token_ids=True, dialect=dialect,
                )  # fmt: skip
                await backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))
                place = route_pb2.RouteTarget(
                    backend=backend.name, backend_model="m", weight=1, policy="p", policy_version=1
                )
                route = route_pb2.Route(name=f"routes/{served}-{name}", targets=[place])
                await routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
