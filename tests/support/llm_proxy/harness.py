"""A whole proxy in the test's own process, on real sockets."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
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
from fulmen_llm_proxy.app import build_proxy
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.security.call_terms import CallTerms
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.llm_proxy.fake_store import SIGNING_KEY

POLICY = "arithmetic"
MODEL = "tiny"


@dataclass(kw_only=True)
class RunningProxy:
    """A proxy that serves, and clients of it."""

    parts: ServiceParts
    signer: TokenSigner
    channel: FulmenChannel
    http: aiohttp.ClientSession
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        """The base URL that an OpenAI client is given."""
        return f"http://127.0.0.1:{self.parts.ports['http_port']}/v1"

    @property
    def routes(self) -> Any:
        """A stub of RouteService."""
        return route_service_pb2_grpc.RouteServiceStub(self.channel)

    @property
    def backends(self) -> Any:
        """A stub of BackendService."""
        return backend_service_pb2_grpc.BackendServiceStub(self.channel)

    @property
    def captures(self) -> Any:
        """A stub of CaptureService."""
        return capture_service_pb2_grpc.CaptureServiceStub(self.channel)

    def attempt(
        self,
        *,
        mode: str = "train",
        ttl_s: float = 600,
        rollout_id: uuid.UUID | None = None,
        number: int = 1,
        **terms: Any,
    ) -> tuple[str, str]:
        """Returns the name of an attempt, of a new rollout if none is given, and its key."""
        name = AttemptName(project=DEFAULT_PROJECT, rollout_id=rollout_id or uuid7(), number=number)
        key = self.signer.attempt_key(
            name,
            project=DEFAULT_PROJECT,
            lease_id="lease-1",
            epoch=number,
            mode=mode,
            ttl_s=ttl_s,
            terms=CallTerms(**terms),
        )
        return str(name), key

    async def loaded(self) -> None:
        """Returns when it has the store's routes. The caller sets the deadline."""
        while self.parts.server.readiness.report()[1]["routes"] != "ok":  # noqa: ASYNC110  # a probe of it
            await asyncio.sleep(0.02)

    async def register(self, backend_id: str, url: str, **fields: Any) -> None:
        """Registers a backend that returns token ids."""
        backend = backend_pb2.Backend(
            name=f"backends/{backend_id}", base_url=url, **({"returns_token_ids": True} | fields)
        )
        await self.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))

    async def put_route(
        self, *targets: route_pb2.RouteTarget, model: str = MODEL, overrides: dict[str, str] | None = None
    ) -> route_pb2.Route:
        """Puts a route; returns it as the proxy has it."""
        route = route_pb2.Route(
            name=f"routes/{model}",
            targets=targets,
            overrides=[
                route_pb2.ModeOverride(mode=mode, request_fields_json=fields)
                for mode, fields in (overrides or {}).items()
            ],
        )
        answer = await self.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
        return answer.route

    async def health(self, backend_id: str = "one") -> backend_pb2.BackendHealth:
        """Returns how a backend does."""
        answer = await self.backends.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest())
        return next(one for one in answer.backends if one.name == f"backends/{backend_id}")

    def metric(self, name: str, **labels: str) -> float | None:
        """Returns one of its figures, by the name without `fulmen_llm_proxy_`; None if it was never counted."""
        return self.registry.get_sample_value(f"fulmen_llm_proxy_{name}", labels)

    async def flush(self, attempt: str, *, timeout: float = 20) -> capture_service_pb2.CaptureSummary:
        """Flushes one attempt; returns its summary."""
        request = capture_service_pb2.FlushCapturesRequest(attempts=[attempt])
        answer = await self.captures.FlushCaptures(request, timeout=timeout)
        return answer.summaries[0]

    async def chat(
        self, key: str, content: str = "hello", *, model: str = MODEL, **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        """Makes one whole call; returns the status and the answer."""
        body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()


def target(
    backend_id: str = "one", *, version: int = 1, weight: int = 1, policy: str = POLICY
) -> route_pb2.RouteTarget:
    """Returns a target of the policy of the tests."""
    return route_pb2.RouteTarget(
        backend=f"backends/{backend_id}",
        backend_model="byte-model",
        weight=weight,
        policy=policy,
        policy_version=version,
    )


@asynccontextmanager
async def running_proxy(
    store_target: str, *, signing_key: str = SIGNING_KEY, backend_url: str = "", **settings: Any
) -> AsyncIterator[RunningProxy]:
    """Runs a proxy until the block ends, then drains and stops it as the lifecycle does.

    Args:
        backend_url: the backend `one`, to which a trainable route leads; empty for no backend and no route.
    """
    signer = TokenSigner(signing_key)
    token = signer.issue(Role.SERVICE, subject="llm_proxy", ttl_s=3600)
    resolved = LlmProxySettings(
        **{
            "attempt_key_secret": attempt_secrets(signing_key),
            "token": token,
            "store_target": store_target,
            "port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "drain_grace_s": 5,
            **settings,
        }
    )
    async with AsyncExitStack() as stack:
        registry = CollectorRegistry()
        parts = await build_proxy(resolved, stack, registry=registry)
        await parts.server.server.start()
        roles = [asyncio.create_task(role.run(), name=name) for name, role in parts.roles.items()]
        channel = open_channel(f"127.0.0.1:{parts.server.port}", token=token)
        session = aiohttp.ClientSession()
        try:
            running = RunningProxy(parts=parts, signer=signer, channel=channel, http=session, registry=registry)
            if backend_url:
                await running.register("one", backend_url)
                await running.put_route(target("one"))
            yield running
        finally:
            ended = [role for role in roles if role.done()]
            await session.close()
            await channel.close()
            try:
                async with asyncio.timeout(resolved.drain_grace_s):
                    await parts.drain()
            except TimeoutError:
                pass
            await parts.server.server.stop(grace=1)
            for role in roles:
                role.cancel()
            await asyncio.gather(*roles, return_exceptions=True)
            for role in ended:
                role.result()
                raise AssertionError(f"The role {role.get_name()} ended: a proxy would have stopped.")
