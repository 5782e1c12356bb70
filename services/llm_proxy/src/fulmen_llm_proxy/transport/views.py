"""What a caller sees of routes and backends.

Who may see all of them is a rule (`permissions.SEE_ALL_ROUTES`). Others see what their project may use, and of it the fields
named here. Invariant: a field that is added to a message is hidden from them until it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

from google.protobuf.message import Message

from fulmen.ids import ALL_PROJECTS
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.routing.codec import BACKEND_KIND, ROUTE_KIND, parse_backend, parse_route
from fulmen_llm_proxy.routing.resources import Document, ResourceCache
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.permissions import SEE_ALL_ROUTES, is_allowed

__all__ = ["Views"]

Shown = TypeVar("Shown", bound=Message)

# Not: overrides, which may hold what an operator sends to a vendor, and rules of redaction.
ROUTE_FIELDS: Final = (
    "name", "targets", "version", "balancing", "fallbacks", "deadline", "hedge_delay", "cached", "project",
    "rolling_versions", "file",
)  # fmt: skip
# Not: addresses, names of keys, headers and limits.
BACKEND_FIELDS: Final = (
    "name", "dialect", "returns_token_ids", "draining", "api_version", "apis", "engine", "hold_until_time", "project",
    "stale_version", "drop_params", "file", "provider",
)  # fmt: skip


class _OfProject(Protocol):
    """A route or a backend."""

    @property
    def project(self) -> str:
        """`projects/{project}`, or empty for all."""
        ...


class Views:
    """Routes and backends, as the current caller sees them."""

    def __init__(self, resources: ResourceCache, *, project: str) -> None:
        """Sets where they are, and the project that the proxy serves."""
        self._resources = resources
        self._project = project

    def routes(self) -> list[route_pb2.Route]:
        """Returns routes with their versions, ordered by name."""
        found = [_route(document) for document in self._resources.of_kind(ROUTE_KIND).values()]
        if self._sees_all():
            return found
        routes = [route for route in found if _is_open(route)]
        names = {route.name for route in routes}
        backends = {backend.name: backend for backend in self._all_backends()}
        return [_shown_route(route, names, backends) for route in routes]

    def backends(self) -> list[backend_pb2.Backend]:
        """Returns backends, ordered by name."""
        found = self._all_backends()
        if self._sees_all():
            return found
        named = {target.backend for route in self.routes() for target in route.targets}
        return [_only(backend, BACKEND_FIELDS) for backend in found if backend.name in named]

    def seen_backends(self, ids: Sequence[str]) -> list[str]:
        """Returns the ids of backends that the caller may see, in their order."""
        if self._sees_all():
            return list(ids)
        seen = {backend.name for backend in self.backends()}
        return [each for each in ids if f"backends/{each}" in seen]

    def _all_backends(self) -> list[backend_pb2.Backend]:
        return [parse_backend(document.content) for document in self._resources.of_kind(BACKEND_KIND).values()]

    def _sees_all(self) -> bool:
        return is_allowed(current_caller(), SEE_ALL_ROUTES, self._project)


def _route(document: Document) -> route_pb2.Route:
    route = parse_route(document.content)
    route.version = document.version
    return route


def _is_open(shown: _OfProject) -> bool:
    """Returns whether the caller's project may use it."""
    project = current_caller().project
    return shown.project in ("", project) or project == ALL_PROJECTS


def _shown_route(
    route: route_pb2.Route, names: Iterable[str], backends: dict[str, backend_pb2.Backend]
) -> route_pb2.Route:
    """Returns a route with the fields that are shown. Of a target at another project's engine, only its weight is left."""
    shown = _only(route, ROUTE_FIELDS)
    fallbacks = [name for name in route.fallbacks if name in names]
    shown.ClearField("fallbacks")
    shown.fallbacks.extend(fallbacks)
    for target in shown.targets:
        backend = backends.get(target.backend)
        if backend is not None and not _is_open(backend):
            target.CopyFrom(route_pb2.RouteTarget(weight=target.weight))
    return shown


def _only(message: Shown, fields: Sequence[str]) -> Shown:
    """Returns a message with these fields alone."""
    shown = type(message)()
    shown.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        if descriptor.name not in fields:
            shown.ClearField(descriptor.name)
    return shown
