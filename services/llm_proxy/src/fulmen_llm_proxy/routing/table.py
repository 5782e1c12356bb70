"""The routing table: routes, backends and the choice between them.

Invariant: a `RoutingTable` is immutable. Every change is a new table; a running call keeps the choice that it made on
the old one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fulmen.errors import BackendUnavailable, RouteNotFound
from fulmen.ids import ALL_PROJECTS
from fulmen_llm_proxy.apis.api import ApiName, Dialect
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Balancing, CallAffinity, Replica, pick, rendezvous, seed_of
from fulmen_llm_proxy.routing.engines import Engine

OPENAI_APIS = frozenset({ApiName.CHAT, ApiName.COMPLETIONS, ApiName.EMBEDDINGS})
"""APIs of an OpenAI-compatible server by default; few serve the Responses API."""

VLLM_APIS = OPENAI_APIS | {ApiName.COUNT_TOKENS}
"""vLLM counts a prompt as rendered by its chat template. Its own Messages and Responses APIs return no token ids."""

ANTHROPIC_APIS = frozenset({ApiName.MESSAGES, ApiName.COUNT_TOKENS})

LITELLM_APIS = frozenset({ApiName.CHAT, ApiName.EMBEDDINGS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A model server.

    Attributes:
        base_url: URL including the API's version, for example `http://10.0.0.7:8000/v1`.
        dialect: dialect of its headers and errors.
        azure: whether its URLs are Azure-style: the path contains the model, the key is sent in `api-key`.
        api_version: API version sent to it: Azure's `api-version` or Anthropic's `anthropic-version`.
        apis: APIs that it serves itself; others are translated if possible.
        key_name: name of its key in the setting `backend_keys`; empty if it needs none.
        returns_token_ids: whether it returns token ids and log-probabilities on request.
        max_in_flight: maximum number of concurrent requests from this process; more wait.
        draining: whether it receives no new calls.
        requests_per_minute: rate limit of calls from all processes together; 0 means unlimited.
        tokens_per_minute: rate limit of tokens from all processes together; 0 means unlimited.
        engine: its inference engine.
        health_path: path of its health check, from the root of its URL; empty for the engine's default.
        hold_until_s: end of its hold, during which new calls wait in the proxy, seconds since 1970; 0 if not held.
        stale_version: policy version of an answer that was older than its target's, for which it is held; 0 for none.
        headers: name, in lower case, and value of further headers of every request to it.
        drop_params: whether parameters that its API cannot express are dropped; otherwise such calls are refused.
        provider: vendor in LiteLLM's words, which calls it in a process of its own; empty if the proxy calls it itself.
        region: region of that vendor; empty if `base_url` names it.
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
    stale_version: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    drop_params: bool = False
    provider: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A backend and model to which a route may send calls.

    Attributes:
        model: the backend's name of the model.
        policy: policy that it serves; empty for a model that is not trained.
        policy_version: version of the policy that the backend serves.
        weight: share of the calls, relative to the other targets; 0 receives none unless it is the only target.
    """

    backend_id: str
    model: str
    policy: str = ""
    policy_version: int = 0
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What of an app's own calls is kept.

    Attributes:
        sample_rate: share of the calls, over 0 and at most 1.
        redact: names of built-in rules of redaction.
        patterns: further rules, name and regular expression.
        retention_s: how long calls are kept, seconds.
    """

    sample_rate: float
    redact: tuple[str, ...]
    patterns: tuple[tuple[str, str], ...]
    retention_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A public model name and its targets.

    Attributes:
        overrides: request fields set by the route, by mode ("train", "validation", "test").
        balancing: load-balancing policy among the replicas of a variant.
        fallbacks: models whose routes are tried in order if no target of this one answers.
        deadline_s: timeout until the complete answer or first event, seconds; None applies the proxy's setting.
        hedge_delay_s: seconds without a first byte after which a second replica is tried, too; None disables hedging.
        cached: whether equal requests are answered from memory.
        project: project whose callers may use it; empty for every project's.
        recording: recording of calls without an attempt key; None if none is recorded.
        rolling_versions: whether targets that differ only in the policy version are one variant.
    """

    model: str
    targets: tuple[Target, ...]
    overrides: Mapping[str, Mapping[str, msgspec.Raw]] = field(default_factory=dict)
    balancing: Balancing = Balancing.STICKY
    fallbacks: tuple[str, ...] = ()
    deadline_s: float | None = None
    hedge_delay_s: float | None = None
    cached: bool = False
    project: str = ""
    recording: Recording | None = None
    rolling_versions: bool = False

    def is_open_to(self, project: str) -> bool:
        """Returns True if callers of a project, or of `ALL_PROJECTS`, may use it."""
        return self.project in ("", project) or project == ALL_PROJECTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The targets of a route with the same policy, policy version and model, which are interchangeable.

    The targets of a route with rolling versions may differ in the version.

    Attributes:
        targets: targets that receive calls; `backends` and `replicas` are parallel to it.
        weight: sum of the targets' weights.
        seed: hash that represents it among the variants.
    """

    targets: tuple[Target, ...]
    backends: tuple[Backend, ...]
    replicas: tuple[Replica, ...]
    weight: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The target of one try."""

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
        versions: version of each entry's resource, by resource id.
        unreadable: ids of the resources that could not be read; their entries are those of the table before.
    """

    routes: Mapping[str, Route] = field(default_factory=dict)
    backends: Mapping[str, Backend] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    _variants: Mapping[str, tuple[Variant, ...]] = field(init=False, repr=False, compare=False)
    _choices: Mapping[tuple[str, int], tuple[Choice, ...]] = field(init=False, repr=False, compare=False)
    _own: Mapping[tuple[str, str], str] = field(init=False, repr=False, compare=False)

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
        own = {
            (route.project, model.removeprefix(prefix)): model
            for model, route in self.routes.items()
            if route.project and model.startswith(prefix := f"{route.project.removeprefix('projects/')}.")
        }
        object.__setattr__(self, "_own", own)

    def models(self, project: str = ALL_PROJECTS) -> list[str]:
        """Returns the models that callers of a project may use, sorted."""
        own = {short for owner, short in self._own if owner == project}
        return sorted(own.union(model for model, route in self.routes.items() if route.is_open_to(project)))

    def resolved(self, model: str, project: str) -> str:
        """Returns the name of the route that a model means for a project: `PROJECT.MODEL` of its own, if there is one."""
        return self._own.get((project, model), model) if self._own else model

    def serves(self, model: str, project: str) -> bool:
        """Returns True if callers of a project may use a model."""
        route = self.routes.get(model)
        return route is not None and route.is_open_to(project)

    def route(self, model: str, project: str) -> Route:
        """Returns the route of a model.

        Raises:
            RouteNotFound: if the model has no route that callers of the project may use; lists the models that they may.
        """
        route = self.routes.get(model)
        if route is None or not route.is_open_to(project):
            served = ", ".join(self.models(project)) or "none"
            raise RouteNotFound(
                f"Model '{model[:100]}' is not served. Served models: {served}.",
                model=model[:100],
                served=served,
            )
        return route

    def _present(self, model: str) -> Route:
        """Returns the route of a model, which may have been deleted; the error does not list models, since the caller is
        unknown."""
        route = self.routes.get(model)
        if route is None:
            raise RouteNotFound(f"Model '{model[:100]}' is not served.", model=model[:100])
        return route

    def choose(self, model: str, affinity: CallAffinity, states: BackendStates, avoid: Collection[str] = ()) -> Choice:
        """Chooses the target of a call: the variant by the attempt or conversation, then the replica by the route's balancing.

        A change of targets moves as few attempts as possible. Draining backends receive no calls.

        Args:
            avoid: ids of backends to skip if the variant has others.

        Raises:
            RouteNotFound: if the model has no route.
            BackendUnavailable: if the route has no target with a weight and a known backend.
        """
        route = self._present(model)
        variants = self._variants[model]
        if not variants:
            raise BackendUnavailable(f"The route of model '{model}' has no backend.")
        variant = variants[0] if len(variants) == 1 else rendezvous(variants, affinity.conversation)
        seat = None
        if route.balancing is Balancing.STICKY and len(variant.replicas) > 1 and affinity.is_named:
            seat = states.seats.find(affinity.attempt, model)
        replica = pick(
            variant.replicas, states=states, affinity=affinity, balancing=route.balancing, avoid=avoid, seat=seat
        )
        return self._choices[model, variant.seed][replica.index]

    def pinned(self, model: str, backend_id: str) -> Choice | None:
        """Returns the choice of a given backend, whatever its state; None if the model's route does not include it.

        Raises:
            RouteNotFound: if the model has no route.
        """
        route = self._present(model)
        for variant in self._variants[model]:
            for target, backend in zip(variant.targets, variant.backends, strict=True):
                if backend.id == backend_id:
                    return Choice(route=route, variant=variant, target=target, backend=backend)
        return None

    def version_of(self, model: str, target: Target) -> int | None:
        """Returns the current policy version of a route's target; None if the route no longer has it."""
        route = self.routes.get(model)
        for held in route.targets if route is not None else ():
            if (held.backend_id, held.model, held.policy) == (target.backend_id, target.model, target.policy):
                return held.policy_version
        return None


def _variants_of(route: Route, backends: Mapping[str, Backend]) -> tuple[Variant, ...]:
    """Groups the targets of a route that receive calls into variants."""
    grouped: dict[tuple[str, int, str], dict[str, Target]] = {}
    for target in route.targets:
        backend = backends.get(target.backend_id)
        if backend is None or backend.draining or (not target.weight and len(route.targets) > 1):
            continue
        version = 0 if route.rolling_versions else target.policy_version
        members = grouped.setdefault((target.policy, version, target.model), {})
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
