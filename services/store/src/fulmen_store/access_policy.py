"""The roles that may call each rpc of the store."""

from __future__ import annotations

from typing import Final

from fulmen_service_kit.auth import RolePolicy
from fulmen_service_kit.tokens import Role

__all__ = ["ROLE_POLICY", "SCALER", "SERVICE_NAMES"]

_CLIENTS: Final = frozenset({Role.CLIENT, Role.SERVICE})
_RUNNERS: Final = frozenset({Role.RUNNER, Role.SERVICE})
_VIEWERS: Final = _CLIENTS | {Role.READER}
_READERS: Final = _VIEWERS | {Role.RUNNER}
_ALL_ROLES: Final = frozenset(Role)

# KEDA sends no authorization header: the servicer reads the token from the request.
SCALER: Final = "externalscaler.ExternalScaler"
_TRACES: Final = "opentelemetry.proto.collector.trace.v1.TraceService"

SERVICE_NAMES: Final = (
    "fulmen.store.v1.RolloutService",
    "fulmen.store.v1.LeaseService",
    "fulmen.store.v1.SpanService",
    "fulmen.store.v1.ResourceService",
    "fulmen.store.v1.RunnerRegistryService",
    "fulmen.store.v1.ProjectService",
    "fulmen.store.v1.PeerService",
    "fulmen.store.v1.UsageService",
    SCALER,
    _TRACES,
)

ROLE_POLICY: Final = RolePolicy(
    services={
        "fulmen.store.v1.RolloutService": _CLIENTS,
        "fulmen.store.v1.LeaseService": _RUNNERS,
        "fulmen.store.v1.SpanService": _ALL_ROLES - {Role.READER},
        "fulmen.store.v1.ResourceService": _CLIENTS,
        "fulmen.store.v1.RunnerRegistryService": _VIEWERS,
        "fulmen.store.v1.ProjectService": frozenset(),
        "fulmen.store.v1.PeerService": frozenset({Role.SERVICE}),
        "fulmen.store.v1.UsageService": frozenset({Role.SERVICE}),
        SCALER: _READERS,
        _TRACES: _ALL_ROLES - {Role.CLIENT, Role.READER},
    },
    rpcs={
        "/fulmen.store.v1.RolloutService/GetRollout": _ALL_ROLES,
        "/fulmen.store.v1.RolloutService/ListRollouts": _VIEWERS,
        "/fulmen.store.v1.RolloutService/WatchRollouts": _VIEWERS,
        "/fulmen.store.v1.RolloutService/GetQueueStats": _READERS,
        "/fulmen.store.v1.LeaseService/CheckAttempts": frozenset({Role.SERVICE}),
        "/fulmen.store.v1.SpanService/ListSpans": _ALL_ROLES,
        "/fulmen.store.v1.SpanService/StreamSpans": _ALL_ROLES,
        "/fulmen.store.v1.ResourceService/GetResources": _READERS,
        "/fulmen.store.v1.ResourceService/ListResourceVersions": _READERS,
        "/fulmen.store.v1.ResourceService/DiffResources": _VIEWERS,
        "/fulmen.store.v1.ResourceService/WatchResources": _READERS,
        "/fulmen.store.v1.RunnerRegistryService/GetFleetDemand": _READERS,
        "/fulmen.store.v1.UsageService/GetUsage": _VIEWERS,
        "/fulmen.store.v1.ProjectService/GetProject": _ALL_ROLES,
        "/fulmen.store.v1.ProjectService/ListProjects": _VIEWERS,
        "/fulmen.store.v1.ProjectService/ListRevokedTokens": frozenset({Role.SERVICE}),
        "/fulmen.store.v1.ProjectService/IntrospectToken": _RUNNERS,
    },
    self_checking=frozenset({SCALER}),
    audited={
        "/fulmen.store.v1.ProjectService/CreateProject": ("project.name",),
        "/fulmen.store.v1.ProjectService/UpdateProject": ("project.name", "project.etag"),
        "/fulmen.store.v1.ProjectService/IssueToken": ("project", "role", "subject", "ttl"),
        "/fulmen.store.v1.ProjectService/RevokeToken": ("token_id",),
        "/fulmen.store.v1.RolloutService/CancelRollouts": ("project", "training_run", "names"),
        "/fulmen.store.v1.RolloutService/RetryRollouts": ("project", "filter", "names"),
        "/fulmen.store.v1.ResourceService/SetAlias": ("project", "name", "version"),
    },
)
