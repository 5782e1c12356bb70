"""Routes and backends of the LLM proxy."""

from __future__ import annotations

import builtins
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fulmen.client.aio.base import Part, listed
from fulmen.client.proxy import Backend, BackendHealth, Route, Target
from fulmen.client.view import Named, name_of
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.messages import enum_number

__all__ = ["AsyncBackends", "AsyncRoutes"]

ROUTES = "routes/"
BACKENDS = "backends/"
SECONDS_PER_DAY = 86_400


class AsyncRoutes(Part):
    """Routes: the targets of calls by model name. Changing them requires a token of role service or admin."""

    async def put(
        self,
        model: str,
        targets: Sequence[str | Target],
        *,
        fallbacks: Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Route:
        """Adds or replaces a route; all proxies apply it within a second.

        Args:
            model: the public model name.
            targets: backends, with equal weights, or targets with their own settings.
            fallbacks: models whose routes are used if no target answers.
            overrides: request fields to set by mode, such as `{"validation": {"temperature": 0}}`.

        Raises:
            ArgumentInvalid: if the route is malformed.
            BackendNotFound: if a backend does not exist.
        """
        route = route_pb2.Route(
            name=_full(ROUTES, model),
            targets=[
                route_pb2.RouteTarget(backend=_full(BACKENDS, each), weight=1) if isinstance(each, str) else each.proto
                for each in targets
            ],
            fallbacks=[_full(ROUTES, each) for each in fallbacks],
            overrides=[
                route_pb2.ModeOverride(mode=mode, request_fields_json=json.dumps(dict(fields)))
                for mode, fields in (overrides or {}).items()
            ],
        )
        return Route((await self._services.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))).route)

    async def get(self, model: str | Named) -> Route:
        """Returns a route.

        Raises:
            RouteNotFound: if there is none.
        """
        request = route_service_pb2.GetRouteRequest(name=_full(ROUTES, model))
        return Route((await self._services.routes.GetRoute(request)).route)

    async def list(self) -> AsyncIterator[Route]:
        """Yields the routes, ordered by name."""
        request = route_service_pb2.ListRoutesRequest()
        async for each in listed(self._services.routes.ListRoutes, request, "routes"):
            yield Route(each)

    async def delete(self, model: str | Named) -> None:
        """Deletes a route; calls in flight finish."""
        await self._services.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=_full(ROUTES, model)))

    async def record(
        self,
        model: str | Named,
        *,
        sample_rate: float = 1.0,
        redact: Sequence[str] = (),
        patterns: Mapping[str, str] | None = None,
        retention_days: float = 30,
    ) -> Route:
        """Records the calls of an app on a route: those without an attempt.

        Args:
            model: the public model name.
            sample_rate: share of the calls, greater than 0 and at most 1; 0 stops recording.
            redact: built-in rules: `email`, `phone`, `card_number`, `api_key`; empty for all of them, `["none"]` for none.
            patterns: further rules, regular expressions by name.
            retention_days: how long calls are kept.

        Raises:
            RouteNotFound: if there is none.
            ArgumentInvalid: if a rule or number is malformed.
        """
        route = (await self.get(model)).proto
        route.ClearField("recording")
        if sample_rate:
            rules = [
                route_pb2.RedactionPattern(name=name, expression=expression)
                for name, expression in (patterns or {}).items()
            ]
            route.recording.CopyFrom(route_pb2.Recording(sample_rate=sample_rate, redact=redact, patterns=rules))
            route.recording.retention.seconds = round(retention_days * SECONDS_PER_DAY)
        return Route((await self._services.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))).route)

    async def split(self, model: str | Named, weights: Mapping[str, int]) -> Route:
        """Sets the weights of targets by backend, for A/B tests and canaries; attempts stay with their target.

        Raises:
            RouteNotFound: if there is none.
            ArgumentInvalid: if the route has no such target, or the weights sum to zero.
        """
        request = route_service_pb2.SplitTrafficRequest(
            name=_full(ROUTES, model), weights={_full(BACKENDS, each): weight for each, weight in weights.items()}
        )
        return Route((await self._services.routes.SplitTraffic(request)).route)

    async def promote(self, policy: str, version: int) -> builtins.list[Route]:
        """Sets the version that the targets of a policy serve; returns the changed routes.

        Raises:
            RouteNotFound: if no route has a target of this policy.
        """
        request = route_service_pb2.PromoteVersionRequest(policy=policy, policy_version=version)
        return [Route(each) for each in (await self._services.routes.PromoteVersion(request)).routes]

    async def rollback(self, model: str | Named, *, version: int = 0) -> Route:
        """Rolls a route back to an earlier version, as a new version; 0 means the previous version.

        Raises:
            RouteNotFound: if there is none.
            ResourceNotFound: if there is no such version.
        """
        request = route_service_pb2.RollbackRouteRequest(name=_full(ROUTES, model), version=version)
        return Route((await self._services.routes.RollbackRoute(request)).route)


class AsyncBackends(Part):
    """Backends: model servers behind the proxy. Changing them requires a token of role service or admin."""

    async def register(
        self,
        id: str,
        base_url: str,
        *,
        dialect: str = "openai",
        engine: str = "",
        key_name: str = "",
    ) -> Backend:
        """Adds or replaces a backend.

        Args:
            id: id of the backend, 1 to 63 characters of [a-z0-9._-].
            base_url: base URL of its API, such as `http://127.0.0.1:8000/v1`.
            dialect: `openai`, `anthropic` or `azure_openai`.
            engine: `vllm`, `sglang` or `fulmen`; empty if unknown. With one, token ids are captured.
            key_name: name of its API key; empty for none.

        Raises:
            ArgumentInvalid: if it is malformed.
        """
        backend = backend_pb2.Backend(
            name=_full(BACKENDS, id),
            base_url=base_url,
            dialect=enum_number(backend_pb2.Dialect, dialect),
            engine=enum_number(backend_pb2.Engine, engine) if engine else None,
            returns_token_ids=bool(engine),
            key_name=key_name,
        )
        request = backend_service_pb2.RegisterBackendRequest(backend=backend)
        return Backend((await self._services.backends.RegisterBackend(request)).backend)

    async def list(self) -> AsyncIterator[Backend]:
        """Yields the backends, ordered by name."""
        request = backend_service_pb2.ListBackendsRequest()
        async for each in listed(self._services.backends.ListBackends, request, "backends"):
            yield Backend(each)

    async def drain(self, backend: str | Named) -> Backend:
        """Drains a backend: it receives no new calls, and calls in flight finish.

        Raises:
            BackendNotFound: if there is none.
        """
        request = backend_service_pb2.DrainBackendRequest(name=_full(BACKENDS, backend))
        return Backend((await self._services.backends.DrainBackend(request)).backend)

    async def resume(self, backend: str | Named) -> Backend:
        """Ends a drain: the backend receives calls again.

        Raises:
            BackendNotFound: if there is none.
        """
        request = backend_service_pb2.ResumeBackendRequest(name=_full(BACKENDS, backend))
        return Backend((await self._services.backends.ResumeBackend(request)).backend)

    async def delete(self, backend: str | Named) -> None:
        """Deletes a backend; calls in flight finish.

        Raises:
            BackendInUse: if a route still uses it.
        """
        request = backend_service_pb2.DeleteBackendRequest(name=_full(BACKENDS, backend))
        await self._services.backends.DeleteBackend(request)

    async def health(self) -> builtins.list[BackendHealth]:
        """Returns the health of the backends as this proxy sees it, ordered by name."""
        request = backend_service_pb2.GetBackendHealthRequest()
        answer = await self._services.backends.GetBackendHealth(request)
        return [BackendHealth(each) for each in answer.backends]


def _full(prefix: str, given: str | Named) -> str:
    name = name_of(given)
    return name if name.startswith(prefix) else f"{prefix}{name}"
