"""Fulmen's proxy as it is run: processes of its own, with capture, attribution, limits, metrics and delivery on."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.proxy import processes
from benchmarks.proxy.cases import Case, Identity, Target
from benchmarks.proxy.stores import Store
from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import (
    backend_pb2,
    backend_service_pb2,
    backend_service_pb2_grpc,
    capture_service_pb2,
    capture_service_pb2_grpc,
    route_pb2,
    route_service_pb2,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner

NAME = "Fulmen"
POLICY = "policy"
PATH = "/v1/chat/completions"
START_LIMIT_S = 60.0
_KEY_TTL_S = 7200.0
_MAX_IN_FLIGHT = 4000
_ATTEMPTS_PER_FLUSH = 1000
_FLUSH_LIMIT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One process of the proxy, and a channel to it."""

    process: asyncio.subprocess.Process
    address: str
    channel: FulmenChannel

    def pids(self) -> list[int]:
        """Returns its processes."""
        return processes.tree(self.process.pid)


@dataclass(slots=True, kw_only=True)
class Fulmen:
    """Replicas that share a store, a route and its backends."""

    store: Store
    signer: TokenSigner
    replicas: list[Replica]
    made: list[str] = field(default_factory=list)
    captured: int = 0

    async def identities(self, case: Case, count: int) -> list[Identity]:
        """Makes keys: of as many attempts, or one of a client whose calls only pass."""
        if not case.captured:
            return [(PATH, self.signer.issue(Role.CLIENT, subject="benchmark", ttl_s=_KEY_TTL_S))]
        attempts = await self.store.attempts(count)
        self.made += attempts
        return [(PATH, self._attempt_key(attempt)) for attempt in attempts]

    def _attempt_key(self, attempt: str) -> str:
        return self.signer.attempt_key(
            attempt, project=DEFAULT_PROJECT, lease_id="lease", epoch=1, mode="train", ttl_s=_KEY_TTL_S
        )

    async def settle(self) -> None:
        """Waits until the store has every capture.

        Raises:
            RuntimeError: if one is not delivered, or not usable for training.
        """
        made, self.made = self.made, []
        captures = capture_service_pb2_grpc.CaptureServiceStub(self.replicas[0].channel)
        for start in range(0, len(made), _ATTEMPTS_PER_FLUSH):
            request = capture_service_pb2.FlushCapturesRequest(attempts=made[start : start + _ATTEMPTS_PER_FLUSH])
            answer = await captures.FlushCaptures(request, timeout=_FLUSH_LIMIT_S)
            for summary in answer.summaries:
                if summary.unusable_count or not summary.flushed:
                    raise RuntimeError(f"captures are not delivered or not usable: {summary}")
                self.captured += summary.call_count

    async def register(self, backend_id: str, url: str) -> None:
        """Registers a backend."""
        backend = backend_pb2.Backend(
            name=f"backends/{backend_id}", base_url=url, returns_token_ids=True, max_in_flight=_MAX_IN_FLIGHT
        )
        stub = backend_service_pb2_grpc.BackendServiceStub(self.replicas[0].channel)
        await stub.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))

    async def route(self, backend_id: str, version: int) -> None:
        """Sends everything to one backend."""
        target = route_pb2.RouteTarget(
            backend=f"backends/{backend_id}", weight=1, policy=POLICY, policy_version=version
        )
        route = route_pb2.Route(name="routes/canned", targets=[target])
        stub = route_service_pb2_grpc.RouteServiceStub(self.replicas[0].channel)
        await stub.PutRoute(route_service_pb2.PutRouteRequest(route=route))

    async def promote(self, version: int) -> None:
        """Promotes a version of the policy."""
        stub = route_service_pb2_grpc.RouteServiceStub(self.replicas[0].channel)
        request = route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=version)
        await stub.PromoteVersion(request)

    def target(self) -> Target:
        """Returns what is measured: the first replica."""
        first = self.replicas[0]
        return Target(
            name=NAME,
            addresses=[first.address],
            pids=first.pids,
            identities=self.identities,
            settle=self.settle,
            injects=True,
        )


@asynccontextmanager
async def replica(store: Store, signer: TokenSigner) -> AsyncIterator[Replica]:
    """Runs one process of the proxy."""
    token = signer.issue(Role.SERVICE, subject="llm_proxy", ttl_s=_KEY_TTL_S)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        environment = {
            "FULMEN_LLM_PROXY_ATTEMPT_KEY_SECRET": attempt_secrets(store.signing_key),
            "FULMEN_LLM_PROXY_TOKEN": token,
            "FULMEN_LLM_PROXY_STORE_TARGET": store.target,
            "FULMEN_LLM_PROXY_PORT": "0",
            "FULMEN_LLM_PROXY_HTTP_PORT": "0",
            "FULMEN_LLM_PROXY_METRICS_PORT": "0",
            "FULMEN_LLM_PROXY_READY_FILE": str(ready),
            "FULMEN_LLM_PROXY_LOG_LEVEL": "warning",
        }
        command = (sys.executable, "-m", "fulmen_llm_proxy", "serve")
        async with processes.running(*command, environment=environment) as process:
            async with asyncio.timeout(START_LIMIT_S):
                while not ready.exists():  # a file of another process
                    if process.returncode is not None:
                        raise RuntimeError("the proxy ended before it served: see its log above")
                    await asyncio.sleep(0.05)
            ports = json.loads(ready.read_text())
            async with open_channel(f"127.0.0.1:{ports['port']}", token=token) as channel:
                yield Replica(process=process, address=f"127.0.0.1:{ports['http_port']}", channel=channel)


@asynccontextmanager
async def running(store: Store, backend: str) -> AsyncIterator[Fulmen]:
    """Runs one replica with a trainable route to the backend."""
    signer = TokenSigner(store.signing_key)
    async with replica(store, signer) as first:
        fulmen = Fulmen(store=store, signer=signer, replicas=[first])
        await fulmen.register("one", f"http://{backend}/v1")
        await fulmen.route("one", 1)
        yield fulmen
