"""Routes and backends of the LLM proxy as records."""

from __future__ import annotations

import datetime
import json
from typing import Any, ClassVar

from fulmen.client.view import View
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.messages import enum_word, moment

__all__ = ["Backend", "BackendHealth", "Route", "Target"]


class Target(View[route_pb2.RouteTarget]):
    """A target of a route's calls."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("backend", "model", "weight")

    @property
    def backend(self) -> str:
        """`backends/{id}`."""
        return str(self.proto.backend)

    @property
    def model(self) -> str:
        """Model name sent to the backend; empty for the public one."""
        return str(self.proto.backend_model)

    @property
    def weight(self) -> int:
        """Weight among the targets, 0 to 10000."""
        return int(self.proto.weight)

    @property
    def policy(self) -> str:
        """The policy that it serves; empty if it is not trainable."""
        return str(self.proto.policy)

    @property
    def policy_version(self) -> int:
        """Version of the policy; 0 if unset."""
        return int(self.proto.policy_version)


class Route(View[route_pb2.Route]):
    """The targets of a public model name."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("model", "targets")

    @property
    def name(self) -> str:
        """`routes/{model}`."""
        return str(self.proto.name)

    @property
    def model(self) -> str:
        """The model name that agents request."""
        return self.name.removeprefix("routes/")

    @property
    def version(self) -> int:
        """Version of the route."""
        return int(self.proto.version)

    @property
    def project(self) -> str:
        """Project whose callers may use the route, `projects/{project}`; empty for all projects."""
        return str(self.proto.project)

    @property
    def targets(self) -> list[Target]:
        """Targets of the calls."""
        return [Target(each) for each in self.proto.targets]

    @property
    def fallbacks(self) -> list[str]:
        """Routes that are tried when no target answers, `routes/{model}`."""
        return list(self.proto.fallbacks)

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Request fields that the route sets, by mode."""
        return {each.mode: json.loads(each.request_fields_json) for each in self.proto.overrides}


class Backend(View[backend_pb2.Backend]):
    """A model server."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "base_url")

    @property
    def name(self) -> str:
        """`backends/{id}`."""
        return str(self.proto.name)

    @property
    def base_url(self) -> str:
        """Base URL of its API."""
        return str(self.proto.base_url)

    @property
    def dialect(self) -> str:
        """`openai`, `anthropic` or `azure_openai`."""
        return enum_word(self.proto, "dialect") or "openai"

    @property
    def engine(self) -> str:
        """`vllm`, `sglang` or `fulmen`; empty if unknown."""
        return enum_word(self.proto, "engine")

    @property
    def is_draining(self) -> bool:
        """Whether it is drained and receives no new calls."""
        return bool(self.proto.draining)


class BackendHealth(View[backend_pb2.BackendHealth]):
    """Health of a backend as one proxy sees it."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "is_healthy", "breaker")

    @property
    def name(self) -> str:
        """`backends/{id}`."""
        return str(self.proto.name)

    @property
    def is_healthy(self) -> bool:
        """Whether it is healthy."""
        return bool(self.proto.healthy)

    @property
    def breaker(self) -> str:
        """State of the circuit breaker: `closed`, `open` or `half_open`."""
        return enum_word(self.proto, "breaker")

    @property
    def in_flight_count(self) -> int:
        """Number of calls in flight."""
        return int(self.proto.in_flight_count)

    @property
    def failure_count(self) -> int:
        """Number of failed calls since the proxy started."""
        return int(self.proto.failure_count)

    @property
    def last_failure_time(self) -> datetime.datetime | None:
        """When a call last failed, UTC; None if none did."""
        return moment(self.proto.last_failure_time)
