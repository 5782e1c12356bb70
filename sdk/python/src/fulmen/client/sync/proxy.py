"""Routes and backends of the LLM proxy. Made by tools/sync_client.py of `fulmen.client.aio.proxy`."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulmen.client.aio.proxy import AsyncBackends, AsyncRoutes
from fulmen.client.face import Face
from fulmen.client.proxy import Backend, BackendHealth, Route, Target
from fulmen.client.view import Named

__all__ = ["Routes", "Backends"]


class Routes(Face):
    """Routes: where calls of a model name go. They need a token of the role service or admin."""

    _wraps = AsyncRoutes
    _aio: AsyncRoutes

    def put(
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
            targets: backends, of equal weight, or targets with settings of their own.
            fallbacks: models whose routes are used if no target answers.
            overrides: request fields to set by mode, such as `{"validation": {"temperature": 0}}`.

        Raises:
            ArgumentInvalid: if the route is malformed.
            BackendNotFound: if a backend does not exist.
        """
        return self._call(self._aio.put(model, targets, fallbacks=fallbacks, overrides=overrides))

    def get(self, model: str | Named) -> Route:
        """Returns a route.

        Raises:
            RouteNotFound: if there is none.
        """
        return self._call(self._aio.get(model))

    def list(self) -> Iterator[Route]:
        """Yields the routes, ordered by name."""
        return self._iterate(self._aio.list())

    def delete(self, model: str | Named) -> None:
        """Deletes a route; calls in flight finish."""
        self._call(self._aio.delete(model))

    def record(
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
            sample_rate: share of the calls, over 0 and at most 1; 0 records none any more.
            redact: built-in rules, `email`, `phone`, `card_number`, `api_key`; none for all of them, `["none"]` for no rule.
            patterns: further rules, regular expressions by name.
            retention_days: how long calls are kept.

        Raises:
            RouteNotFound: if there is none.
            ArgumentInvalid: if a rule or number is malformed.
        """
        return self._call(
            self._aio.record(
                model, sample_rate=sample_rate, redact=redact, patterns=patterns, retention_days=retention_days
            )
        )

    def split(self, model: str | Named, weights: Mapping[str, int]) -> Route:
        """Sets the weights of targets by backend, for A/B tests and canaries; attempts stay where they are.

        Raises:
            RouteNotFound: if there is none.
            ArgumentInvalid: if the route has no such target, or the weights sum to zero.
        """
        return self._call(self._aio.split(model, weights))

    def promote(self, policy: str, version: int) -> builtins.list[Route]:
        """Sets the version that the targets of a policy serve; returns the changed routes.

        Raises:
            RouteNotFound: if no route has a target of this policy.
        """
        return self._call(self._aio.promote(policy, version))

    def rollback(self, model: str | Named, *, version: int = 0) -> Route:
        """Rolls a route back to an earlier version, as a new version; 0 is the one before.

        Raises:
            RouteNotFound: if there is none.
            ResourceNotFound: if there is no such version.
        """
        return self._call(self._aio.rollback(model, version=version))

    @property
    def aio(self) -> AsyncRoutes:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Backends(Face):
    """Backends: model servers behind the proxy. They need a token of the role service or admin."""

    _wraps = AsyncBackends
    _aio: AsyncBackends

    def register(
        self, id: str, base_url: str, *, dialect: str = "openai", engine: str = "", key_name: str = ""
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
        return self._call(self._aio.register(id, base_url, dialect=dialect, engine=engine, key_name=key_name))

    def list(self) -> Iterator[Backend]:
        """Yields the backends, ordered by name."""
        return self._iterate(self._aio.list())

    def drain(self, backend: str | Named) -> Backend:
        """Sends it no new calls; those in flight finish.

        Raises:
            BackendNotFound: if there is none.
        """
        return self._call(self._aio.drain(backend))

    def resume(self, backend: str | Named) -> Backend:
        """Sends it calls again after `drain`.

        Raises:
            BackendNotFound: if there is none.
        """
        return self._call(self._aio.resume(backend))

    def delete(self, backend: str | Named) -> None:
        """Deletes it; calls in flight finish.

        Raises:
            BackendInUse: if a route still names it.
        """
        self._call(self._aio.delete(backend))

    def health(self) -> builtins.list[BackendHealth]:
        """Returns the health of the backends as this proxy sees it, ordered by name."""
        return self._call(self._aio.health())

    @property
    def aio(self) -> AsyncBackends:
        """The same, asynchronous, over the same connection."""
        return self._aio
