"""Which backend answers which call.

Invariant: a `RoutingTable` never changes. A new state of the world is a new table; a call that has
begun keeps the choice that it made on the old one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from fulmen.errors import BackendUnavailable, RouteNotFound
from fulmen_llm_proxy.domain.apis.api import ApiName, Dialect
from fulmen_llm_proxy.domain.engines import Engine

_HASH_SPACE = float(1 << 64)

OPENAI_APIS = frozenset({ApiName.CHAT, ApiName.COMPLETIONS, ApiName.EMBEDDINGS})
"""What an OpenAI-compatible server serves unless its backend says otherwise: responses are seldom among it."""

ANTHROPIC_APIS = frozenset({ApiName.MESSAGES, ApiName.COUNT_TOKENS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A model server.

    Attributes:
        base_url: address up to and with the API's version, for example `http://10.0.0.7:8000/v1`.
        dialect: whose headers and wording of errors it uses.
        azure: its addresses are Azure-style: the model is part of the path, the key goes in `api-key`.
        api_version: what it is told its API's version is: Azure's `api-version`, Anthropic's `anthropic-version`.
        apis: the APIs that it serves itself; all others are translated, if they can be.
        key_name: name of the secret in the setting `backend_keys`; empty for a server without keys.
        returns_token_ids: its answers carry token ids and log-probabilities when asked to.
        max_in_flight: most requests at once from this process; more wait.
        draining: takes no new calls.
        requests_per_minute: most calls from all processes together; 0: any number.
        tokens_per_minute: most tokens of calls from all processes together; 0: any number.
        engine: what runs there.
        hold_until_s: until when new calls for it wait in the proxy, seconds since 1970; 0: not held.
    """

    id: str
    base_url: str
    dialect: Dialect = Dialect.OPENAI
    azure: bool = False
    api_version: str = ""
    apis: frozenset[ApiName] = OPENAI_APIS
    key_name: str = ""
    returns_token_ids: bool = False
    max_in_flight: int = 1024
    draining: bool = False
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    engine: Engine = Engine.UNKNOWN
    hold_until_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place to which a route may send a call.

    Attributes:
        model: the name that the backend knows the model by.
        policy: the policy that it serves; empty for a model that is not trained.
        policy_version: version of the policy that the backend serves under that name.
        weight: share of the calls, relative to the other targets; 0 takes none, unless the target
            is the only one.
    """

    backend_id: str
    model: str
    policy: str = ""
    policy_version: int = 0
    weight: int = 1

    @property
    def key(self) -> bytes:
        """Identifies the target among its route's, for consistent choice."""
        return f"{self.backend_id}\0{self.model}\0{self.policy_version}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A public model name and where its calls go.

    Attributes:
        overrides: request fields that the route sets, by mode ("train", "validation", "test").
    """

    model: str
    targets: tuple[Target, ...]
    overrides: Mapping[str, Mapping[str, msgspec.Raw]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one call goes."""

    route: Route
    target: Target
    backend: Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """All routes and backends at one moment.

    Attributes:
        routes: by public model name.
        backends: by id.
        versions: version of the resource behind each entry, by resource id.
    """

    routes: Mapping[str, Route] = field(default_factory=dict)
    backends: Mapping[str, Backend] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def choose(self, model: str, affinity: bytes, healthy: Callable[[str], bool]) -> Choice:
        """Chooses the target of a call.

        The choice is sticky: the same affinity and the same targets give the same target, and a
        change of the targets moves as few callers as possible. Targets whose backend is not healthy
        are passed over as long as another is left; when none is, all are tried, since a health mark
        may be wrong and refusing every call is never better. A draining backend gets no call.

        Raises:
            RouteNotFound: if there is no such route; says which models are served.
            BackendUnavailable: if the route has no target with a weight and a known backend.
        """
        route = self.routes.get(model)
        if route is None:
            served = ", ".join(sorted(self.routes)) or "none"
            raise RouteNotFound(
                f"The model '{model[:100]}' is not served here. Served models: {served}.",
                model=model[:100],
                served=served,
            )
        known = [t for t in route.targets if self._takes_calls(t.backend_id)]
        if len(route.targets) > 1:
            known = [t for t in known if t.weight > 0]
        if not known:
            raise BackendUnavailable(f"The route of the model '{model}' has no backend.")
        target = known[0]
        if len(known) > 1:
            well = [t for t in known if healthy(t.backend_id)]
            target = _rendezvous(well or known, affinity)
        return Choice(route=route, target=target, backend=self.backends[target.backend_id])

    def version_of(self, model: str, target: Target) -> int | None:
        """Returns the policy version that a route's target has now; None if the route has no such target."""
        route = self.routes.get(model)
        for held in route.targets if route is not None else ():
            if (held.backend_id, held.model, held.policy) == (target.backend_id, target.model, target.policy):
                return held.policy_version
        return None

    def _takes_calls(self, backend_id: str) -> bool:
        backend = self.backends.get(backend_id)
        return backend is not None and not backend.draining


def _rendezvous(targets: list[Target], affinity: bytes) -> Target:
    """Weighted rendezvous hashing: each target draws a score, the best score wins.

    Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (SPAA 2005).
    """
    if len(targets) == 1:
        return targets[0]
    return max(targets, key=lambda target: _score(target, affinity))


def _score(target: Target, affinity: bytes) -> float:
    digest = hashlib.blake2b(target.key, digest_size=8, key=affinity[:64]).digest()
    # Half a step up keeps the draw strictly between 0 and 1.
    draw = (int.from_bytes(digest, "little") + 0.5) / _HASH_SPACE
    return target.weight / -math.log(draw) if draw < 1.0 else math.inf
