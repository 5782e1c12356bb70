"""Which backend answers which call.

Invariant: a `RoutingTable` never changes. A new state of the world is a new table; a call that has
begun keeps the choice that it made on the old one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fulmen.errors import BackendUnavailable, RouteNotFound
from fulmen_llm_proxy.apis.api import ApiName, Dialect
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Affinity, Balancing, Replica, pick, rendezvous, seed_of
from fulmen_llm_proxy.routing.engines import Engine

OPENAI_APIS = frozenset({ApiName.CHAT, ApiName.COMPLETIONS, ApiName.EMBEDDINGS})
"""What an OpenAI-compatible server serves unless its backend says otherwise: responses are seldom among it."""

VLLM_APIS = OPENAI_APIS | {ApiName.COUNT_TOKENS}
"""vLLM counts a prompt as its chat template renders it. Its own messages and responses do not return token ids."""

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
        health_path: where its health is asked, from the root of its address; empty: the engine's own path.
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
    health_path: str = ""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A public model name and where its calls go.

    Attributes:
        overrides: request fields that the route sets, by mode ("train", "validation", "test").
        balancing: how a replica is chosen among those of a variant.
        fallbacks: models whose routes are tried in turn when no target of this one can answer.
        deadline_s: seconds until a call must have its whole answer, or its first event; None: the proxy's setting.
        hedge_delay_s: seconds without a first byte after which a second replica is asked as well; None: never.
        cached: equal requests are answered from memory.
    """

    model: str
    targets: tuple[Target, ...]
    overrides: Mapping[str, Mapping[str, msgspec.Raw]] = field(default_factory=dict)
    balancing: Balancing = Balancing.STICKY
    fallbacks: tuple[str, ...] = ()
    deadline_s: float | None = None
    hedge_delay_s: float | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a call may be answered by, whoever answers: one policy, policy version and backend's model.

    Attributes:
        targets: its targets that take calls; `backends` and `replicas` go with them, one by one.
        weight: sum of its targets' weights.
        seed: stands for it in the draw among variants.
    """

    targets: tuple[Target, ...]
    backends: tuple[Backend, ...]
    replicas: tuple[Replica, ...]
    weight: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one call goes."""

    route: Route
    variant: Variant
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
    _variants: Mapping[str, tuple[Variant, ...]] = field(init=False, repr=False, compare=False)
    _choices: Mapping[tuple[str, int], tuple[Choice, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        variants = {model: _variants_of(route, self.backends) for model, route in self.routes.items()}
        choices = {
            (model, variant.seed): tuple(
                Choice(route=self.routes[model], variant=variant, target=target, backend=backend)
                for target, backend in zip(variant.targets, variant.backends, strict=True)
            )
            for model, found in variants.items()
            for variant in found
        }
        object.__setattr__(self, "_variants", variants)
        object.__setattr__(self, "_choices", choices)

    def route(self, model: str) -> Route:
        """Returns the route of a model.

        Raises:
            RouteNotFound: if there is none; says which models are served.
        """
        route = self.routes.get(model)
        if route is None:
            served = ", ".join(sorted(self.routes)) or "none"
            raise RouteNotFound(
                f"The model '{model[:100]}' is not served here. Served models: {served}.",
                model=model[:100],
                served=served,
            )
        return route

    def choose(self, model: str, affinity: Affinity, states: BackendStates, avoid: Collection[str] = ()) -> Choice:
        """Chooses the target of a call: the variant by the attempt, then the replica by the route's balancing.

        The choice is sticky: the same affinity and the same targets give the same target, and a
        change of the targets moves as few callers as possible. A draining backend gets no call.

        Args:
            avoid: ids of backends to pass over if the variant has others.

        Raises:
            RouteNotFound: if there is no such route.
            BackendUnavailable: if the route has no target with a weight and a known backend.
        """
        route = self.route(model)
        variants = self._variants[model]
        if not variants:
            raise BackendUnavailable(f"The route of the model '{model}' has no backend.")
        variant = variants[0] if len(variants) == 1 else rendezvous(variants, affinity.attempt)
        replica = pick(variant.replicas, states=states, affinity=affinity, balancing=route.balancing, avoid=avoid)
        return self._choices[model, variant.seed][replica.index]

    def pinned(self, model: str, backend_id: str) -> Choice | None:
        """Returns the choice of one backend, whatever its state; None if the model's route does not lead there.

        Raises:
            RouteNotFound: if there is no such route.
        """
        route = self.route(model)
        for variant in self._variants[model]:
            for target, backend in zip(variant.targets, variant.backends, strict=True):
                if backend.id == backend_id:
                    return Choice(route=route, variant=variant, target=target, backend=backend)
        return None

    def version_of(self, model: str, target: Target) -> int | None:
        """Returns the policy version that a route's target has now; None if the route has no such target."""
        route = self.routes.get(model)
        for held in route.targets if route is not None else ():
            if (held.backend_id, held.model, held.policy) == (target.backend_id, target.model, target.policy):
                return held.policy_version
        return None


def _variants_of(route: Route, backends: Mapping[str, Backend]) -> tuple[Variant, ...]:
    """Returns the variants of a route, of the targets that take calls."""
    grouped: dict[tuple[str, int, str], dict[str, Target]] = {}
    for target in route.targets:
        backend = backends.get(target.backend_id)
        if backend is None or backend.draining or (not target.weight and len(route.targets) > 1):
            continue
        members = grouped.setdefault((target.policy, target.policy_version, target.model), {})
        twin = members.get(target.backend_id)
        members[target.backend_id] = replace(target, weight=max(1, target.weight) + (twin.weight if twin else 0))
    variants = []
    for key, members in grouped.items():
        targets = tuple(members.values())
        members_backends = tuple(backends[target.backend_id] for target in targets)
        replicas = tuple(
            Replica(
                index=index,
                backend_id=backend.id,
                weight=target.weight,
                seed=seed_of(backend.id),
                max_in_flight=backend.max_in_flight,
                hold_until_s=backend.hold_until_s,
            )
            for index, (target, backend) in enumerate(zip(targets, members_backends, strict=True))
        )
        variants.append(
            Variant(
                targets=targets,
                backends=members_backends,
                replicas=replicas,
                weight=sum(target.weight for target in targets),
                seed=seed_of("\0".join(map(str, key))),
            )
        )
    return tuple(variants)
