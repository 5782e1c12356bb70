"""Who may do what: one table for all services, and the one function that decides by it.

Invariant: an action that the table does not name is open to admins only. Values of secrets are closed to admins too. `docs/security.md` prints the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fulmen.errors import PermissionDenied
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.security.tokens import Caller, Role

__all__ = [
    "MODEL_CALL",
    "MODEL_CALL_FOR_ATTEMPT",
    "OPEN",
    "RULES",
    "SCALER",
    "SEE_ALL_ROUTES",
    "SELF_CHECKING",
    "SET_BACKEND_KEY",
    "Rule",
    "Scope",
    "is_allowed",
    "kind_action",
    "require",
    "rule",
]

_MAX_NAME = 128


class Scope(StrEnum):
    """What an action touches, and so the projects whose tokens allow it."""

    PROJECT = "project"  # objects of one project: tokens of that project, or of all
    SERVICE = "service"  # what a service's projects share: tokens of the project that it serves, or of all
    DEPLOYMENT = "deployment"  # what all projects share: tokens of all projects


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who may do an action.

    Attributes:
        roles: Roles that may, besides ADMIN.
        admins: Whether ADMIN may.
        scope: What it touches.
        audited: Fields of the request for the audit log, paths such as `project.name`; None if calls are not audited.
        is_bulk: Whether it moves so much that the limits of its project do not apply: gradients and weights, which have their own.
    """

    roles: frozenset[Role] = frozenset()
    admins: bool = True
    scope: Scope = Scope.PROJECT
    audited: tuple[str, ...] | None = None
    is_bulk: bool = False

    def allows(self, role: Role) -> bool:
        """Returns True if a role may do it, in some project."""
        return role in self.roles or (self.admins and role is Role.ADMIN)


_KIND_PREFIX: Final = "publish "


def kind_action(kind: str) -> str:
    """Returns the action of publishing versions of a kind of resource and of moving their aliases."""
    return _KIND_PREFIX + kind


def _to(*roles: Role, scope: Scope = Scope.PROJECT, audited: tuple[str, ...] | None = None) -> Rule:
    return Rule(roles=frozenset(roles), scope=scope, audited=audited)


def _only(*roles: Role) -> Rule:
    return Rule(roles=frozenset(roles), admins=False)


_SERVICE, _RUNNER, _CLIENT, _READER, _ATTEMPT = Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER, Role.ATTEMPT
_ENGINE: Final = Role.ENGINE
_RANK: Final = Role.RANK
_WRITERS: Final = (_SERVICE, _CLIENT)
_VIEWERS: Final = (*_WRITERS, _READER)
_READERS: Final = (*_VIEWERS, _RUNNER)
_EVERYONE: Final = (*_READERS, _ATTEMPT)
SCALER: Final = "externalscaler.ExternalScaler"
"""KEDA's service. KEDA sends no authorization header."""
_SHARED, _DEPLOYMENT = Scope.SERVICE, Scope.DEPLOYMENT

_RPCS: Final[Mapping[str, Mapping[str, Rule]]] = {
    "fulmen.store.v1.RolloutService": {
        "BatchCreateRollouts": _to(*_WRITERS),
        "StreamCreateRollouts": _to(*_WRITERS),
        "GetRollout": _to(*_EVERYONE),
        "ListAttempts": _to(*_EVERYONE),
        "ListRollouts": _to(*_VIEWERS),
        "CountRollouts": _to(*_VIEWERS),
        "CompareRollouts": _to(*_VIEWERS),
        "UpdateRollout": _to(
            *_WRITERS, audited=("rollout.name", "update_mask.paths", "rollout.priority", "rollout.deadline_time")
        ),
        "CancelRollouts": _to(*_WRITERS, audited=("project", "training_run", "names")),
        "RetryRollouts": _to(*_WRITERS, audited=("project", "filter", "names")),
        "DeleteRollouts": _to(*_WRITERS, audited=("project", "training_run", "filter", "names")),
        "WatchRollouts": _to(*_VIEWERS),
        "WatchRolloutChanges": _to(*_VIEWERS),
        "GetQueueStats": _to(*_READERS),
        "PauseQueue": _to(*_WRITERS, audited=("project", "reason")),
        "ResumeQueue": _to(*_WRITERS, audited=("project",)),
    },
    "fulmen.store.v1.QueueService": {"ListQueues": _to(*_VIEWERS), "WatchQueueStats": _to(*_VIEWERS)},
    "fulmen.store.v1.LeaseService": {
        "StreamLeases": _to(_SERVICE, _RUNNER),
        "AcquireLeases": _to(_SERVICE, _RUNNER),
        "RenewLeases": _to(_SERVICE, _RUNNER),
        "CompleteAttempts": _to(_SERVICE, _RUNNER),
        "ReleaseLeases": _to(_SERVICE, _RUNNER),
        "CheckAttempts": _to(_SERVICE),
    },
    "fulmen.store.v1.SpanService": {
        "AppendSpans": _to(_SERVICE, _RUNNER, _CLIENT, _ATTEMPT),
        "ListSpans": _to(*_EVERYONE),
        "StreamSpans": _to(*_EVERYONE),
        "WatchSpans": _to(*_EVERYONE),
    },
    "opentelemetry.proto.collector.trace.v1.TraceService": {"Export": _to(_SERVICE, _RUNNER, _ATTEMPT)},
    "fulmen.store.v1.ResourceService": {
        "PublishResources": _to(*_WRITERS, audited=("resources.project", "resources.kind", "resources.name")),
        "GetResources": _to(*_READERS),
        "ReadContent": _to(*_READERS),
        "ListResourceVersions": _to(*_READERS),
        "DiffResources": _to(*_VIEWERS),
        "SetAlias": _to(*_WRITERS, audited=("project", "name", "version")),
        "WatchResources": _to(*_READERS),
    },
    "fulmen.store.v1.RunnerRegistryService": {
        "ListRunners": _to(*_VIEWERS),
        "GetRunner": _to(*_VIEWERS),
        "WatchRunners": _to(*_VIEWERS),
        "GetFleetDemand": _to(*_READERS),
        # Of runners that serve no other project than the token's.
        "SetRunnerSlots": _to(_SERVICE, audited=("name", "slot_count", "automatic")),
        "DrainRunner": _to(_SERVICE, audited=("name",)),
    },
    SCALER: {
        "IsActive": _to(*_READERS),
        "StreamIsActive": _to(*_READERS),
        "GetMetricSpec": _to(*_READERS),
        "GetMetrics": _to(*_READERS),
    },
    "fulmen.store.v1.ProjectService": {
        "CreateProject": _to(scope=_DEPLOYMENT, audited=("project.name",)),
        "GetProject": _to(*_EVERYONE),
        "UpdateProject": _to(audited=("project.name", "project.etag")),
        "DeleteProject": _to(scope=_DEPLOYMENT, audited=("name", "cancel_running")),
        "ResumeAgent": _to(audited=("project", "agent")),
        "ListProjects": _to(*_VIEWERS),
        "IssueToken": _to(_SERVICE, audited=("project", "role", "subject", "ttl")),
        "RevokeToken": _to(audited=("token_id",)),
        "ListTokens": _to(),
        "ListRevokedTokens": _to(_SERVICE),
        "IntrospectToken": _to(_SERVICE, _RUNNER),
        "ListSigningKeys": _to(*_EVERYONE, _ENGINE, _RANK),
        "RefreshToken": _to(_SERVICE, _RUNNER, _ENGINE, _RANK, audited=("project",)),
    },
    "fulmen.store.v1.UsageService": {
        "SyncUsage": _to(_SERVICE),
        "GetUsage": _to(*_VIEWERS),
        "GetUsageSeries": _to(*_VIEWERS),
    },
    "fulmen.store.v1.AuditService": {"ListAuditEntries": _to()},
    "fulmen.store.v1.AnnotationService": {
        "CreateAnnotation": _to(*_WRITERS),
        "UpdateAnnotation": _to(*_WRITERS, audited=("annotation.name",)),
        "DeleteAnnotation": _to(*_WRITERS, audited=("name",)),
        "ListAnnotations": _to(*_VIEWERS),
        "GetAgreement": _to(*_VIEWERS),
    },
    "fulmen.store.v1.ProxyService": {"SyncProxy": _to(_SERVICE), "GetCaptureTotals": _to(_SERVICE)},
    "fulmen.store.v1.CallService": {
        "RecordCalls": _to(_SERVICE),
        "ListCalls": _to(*_VIEWERS),
        "GetCall": _to(*_VIEWERS),
        "ListConversations": _to(*_VIEWERS),
        "DeleteConversations": _to(*_WRITERS, audited=("names",)),
        "RateConversation": _to(*_WRITERS),
    },
    "fulmen.store.v1.StoredResponseService": {
        # The proxy alone knows whose a response is.
        "PutStoredResponse": _to(_SERVICE),
        "GetStoredResponses": _to(_SERVICE),
        "DeleteStoredResponse": _to(_SERVICE),
    },
    # The proxy's, for agents.
    "fulmen.store.v1.EffectService": {"BeginEffect": _to(_SERVICE), "EndEffect": _to(_SERVICE)},
    "fulmen.store.v1.SecretService": {
        "SetSecret": _to(*_WRITERS, audited=("project", "name", "hosts")),
        "ListSecrets": _to(*_VIEWERS),
        "DeleteSecret": _to(*_WRITERS, audited=("project", "name")),
        # The only readers of values.
        "GetAttemptSecrets": _only(_RUNNER),
        "GetBackendKeys": _only(_SERVICE),
    },
    "fulmen.store.v1.ScheduleService": {
        "CreateSchedule": _to(*_WRITERS, audited=("schedule.name", "schedule.cron", "schedule.time_zone")),
        "GetSchedule": _to(*_VIEWERS),
        "ListSchedules": _to(*_VIEWERS),
        "PauseSchedule": _to(*_WRITERS, audited=("name", "reason")),
        "ResumeSchedule": _to(*_WRITERS, audited=("name",)),
        "DeleteSchedule": _to(*_WRITERS, audited=("name",)),
    },
    "fulmen.store.v1.RunLeaseService": {
        "CreateRunLease": _to(_SERVICE, audited=("training_run",)),
        "AcquireRunLease": _to(_SERVICE),
        "RenewRunLeases": _to(_SERVICE),
        "ReleaseRunLease": _to(_SERVICE),
        "ListRunLeases": _to(*_VIEWERS),
    },
    "fulmen.store.v1.RunHistoryService": {
        "AppendRunHistory": _to(_SERVICE),
        "GetRunMetrics": _to(*_VIEWERS),
        "ListRewardDistributions": _to(*_VIEWERS),
        "ListRunNotices": _to(*_VIEWERS),
    },
    "fulmen.store.v1.PeerService": {"Notify": _to(_SERVICE, scope=_DEPLOYMENT)},
    "fulmen.llm_proxy.v1.RouteService": {
        "PutRoute": _to(_SERVICE, scope=_SHARED, audited=("route.name",)),
        # Of the routes that the project may use, see SEE_ALL_ROUTES.
        "GetRoute": _to(*_VIEWERS),
        "ListRoutes": _to(*_VIEWERS),
        "PromoteVersion": _to(_SERVICE, scope=_SHARED, audited=("policy", "policy_version")),
        "DeleteRoute": _to(_SERVICE, scope=_SHARED, audited=("name",)),
        "RollbackRoute": _to(_SERVICE, scope=_SHARED, audited=("name", "version")),
        "SplitTraffic": _to(_SERVICE, scope=_SHARED, audited=("name", "weights", "version_weights")),
        "WatchRoutes": _to(*_VIEWERS),
        "ApplyFile": _to(_SERVICE, scope=_SHARED, audited=("file",)),
    },
    "fulmen.llm_proxy.v1.BackendService": {
        "RegisterBackend": _to(_SERVICE, scope=_SHARED, audited=("backend.name",)),
        # Of the backends of these routes.
        "ListBackends": _to(*_VIEWERS),
        "DrainBackend": _to(_SERVICE, scope=_SHARED, audited=("name",)),
        "ResumeBackend": _to(_SERVICE, scope=_SHARED, audited=("name",)),
        "HoldBackend": _to(_SERVICE, scope=_SHARED),
        "ReleaseBackend": _to(_SERVICE, scope=_SHARED),
        "DeleteBackend": _to(_SERVICE, scope=_SHARED, audited=("name",)),
        "GetBackendHealth": _to(*_VIEWERS),
    },
    "fulmen.llm_proxy.v1.CaptureService": {"FlushCaptures": _to(_SERVICE, _RUNNER)},
    "fulmen.llm_proxy.v1.CompletionService": {
        "Complete": _to(*_WRITERS, _ATTEMPT),
        "StreamComplete": _to(*_WRITERS, _ATTEMPT),
    },
    "fulmen.algorithm.v1.TrainingRunService": {
        "CreateTrainingRun": _to(
            *_WRITERS, audited=("training_run.name", "training_run.project", "training_run.algorithm")
        ),
        "PlanTrainingRun": _to(*_WRITERS),
        "GetTrainingRun": _to(*_VIEWERS),
        "ListTrainingRuns": _to(*_VIEWERS),
        "UpdateTrainingRun": _to(*_WRITERS, audited=("name",)),
        "ListPromptCandidates": _to(*_VIEWERS),
        "WatchTrainingRun": _to(*_VIEWERS),
        "PauseTrainingRun": _to(*_WRITERS, audited=("name",)),
        "ResumeTrainingRun": _to(*_WRITERS, audited=("name",)),
        "CancelTrainingRun": _to(*_WRITERS, audited=("name",)),
        "ListCheckpoints": _to(*_VIEWERS),
        "RollbackTrainingRun": _to(*_WRITERS, audited=("checkpoint",)),
        "GetTrainingRunReport": _to(*_VIEWERS),
        "ListAlgorithms": _to(*_VIEWERS),
    },
    "fulmen.algorithm.v1.WeightService": {
        "BeginUpload": _to(*_WRITERS),
        # Limited by the service itself, so that an upload delays no other call of its project.
        "UploadChunks": Rule(roles=frozenset(_WRITERS), is_bulk=True),
        "CommitUpload": _to(*_WRITERS, audited=("upload", "alias")),
        "ListModels": _to(*_VIEWERS),
        "DeleteModel": _to(*_WRITERS, audited=("name",)),
        "GetWeights": _to(*_WRITERS, _ENGINE, audited=("source.model", "source.policy_version", "source.project")),
        "DownloadChunks": Rule(roles=frozenset({*_WRITERS, _ENGINE}), is_bulk=True),
    },
    "fulmen.algorithm.v1.TrainerService": {
        "CreateTrainer": _to(*_WRITERS, audited=("project", "policy.name", "checkpoint")),
        "GetTrainer": _to(*_VIEWERS),
        "ListTrainers": _to(*_VIEWERS),
        "DeleteTrainer": _to(*_WRITERS, audited=("name",)),
        "ForwardBackward": _to(*_WRITERS),
        "OptimStep": _to(*_WRITERS),
        "Sample": _to(*_WRITERS),
        "RenderMessages": _to(*_WRITERS),
        "SaveCheckpoint": _to(*_WRITERS, audited=("name", "checkpoint")),
        "PublishVersion": _to(*_WRITERS, audited=("name", "alias")),
    },
    "fulmen.algorithm.v1.EngineService": {"JoinEngine": _to(_ENGINE, audited=("hello.training_run", "hello.base_url"))},
    "fulmen.algorithm.v1.RankService": {"JoinRanks": _to(_RANK, audited=("hello.training_run", "hello.node"))},
    "fulmen.algorithm.v1.GradientExchangeService": {
        "Join": _to(_SERVICE),
        "Leave": _to(_SERVICE),
        "Exchange": Rule(roles=frozenset({_SERVICE}), is_bulk=True),
        "GetRound": _to(*_VIEWERS),
        "GetExchange": _to(*_VIEWERS),
    },
    "fulmen.runner.v1.RunnerService": {
        "GetStatus": _to(_SERVICE, _RUNNER, scope=_DEPLOYMENT),
        "Drain": _to(_SERVICE, _RUNNER, scope=_DEPLOYMENT, audited=()),
        "SetSlots": _to(_SERVICE, _RUNNER, scope=_DEPLOYMENT, audited=("slot_count", "automatic")),
        "DumpStacks": _to(_SERVICE, _RUNNER, scope=_DEPLOYMENT),
    },
}

_KINDS: Final[Mapping[str, Rule]] = {
    # The proxy sends its keys to backends, and calls to where routes point.
    "backend": _to(_SERVICE),
    "route": _to(_SERVICE),
    # The algorithm service loads weights from the path that a policy names.
    "policy": _to(_SERVICE),
    "agent": _to(*_WRITERS),
    "bundle": _to(*_WRITERS),
    "prompt": _to(*_WRITERS),
    "scores": _to(*_WRITERS),
}

MODEL_CALL: Final = "call a model over HTTP"
SET_BACKEND_KEY: Final = "SetSecret and DeleteSecret of a backend's key"
SEE_ALL_ROUTES: Final = "see routes and backends of all projects, with their addresses"
MODEL_CALL_FOR_ATTEMPT: Final = "call a model over HTTP for an attempt"

RULES: Final[Mapping[str, Rule]] = {
    f"/{service}/{rpc}": rule for service, rules in _RPCS.items() for rpc, rule in rules.items()
} | {
    MODEL_CALL: _to(*_WRITERS, _ATTEMPT),
    # Like backends: the proxy sends it where backends are.
    SET_BACKEND_KEY: _to(_SERVICE),
    MODEL_CALL_FOR_ATTEMPT: _to(*_WRITERS, _ATTEMPT, _RUNNER),
    SEE_ALL_ROUTES: _to(_SERVICE, scope=_SHARED),
    **{kind_action(kind): rule for kind, rule in _KINDS.items()},
}
"""Rules by action: the full name of an rpc, such as `/fulmen.store.v1.LeaseService/StreamLeases`, `kind_action(kind)`, or one of the above."""

OPEN: Final = frozenset({"/fulmen.store.v1.ProjectService/ListSigningKeys"})
"""Rpcs that need no token."""

SELF_CHECKING: Final = frozenset(f"/{SCALER}/{rpc}" for rpc in _RPCS[SCALER])
"""Rpcs that accept calls without an authorization header. Their servicers read a token from the request first."""

_OTHER_KIND: Final = _to(*_WRITERS)
"""Kinds that no service reads."""

_ADMINS_ONLY: Final = Rule()


def rule(action: str) -> Rule:
    """Returns the rule of an action."""
    return RULES.get(action) or (_OTHER_KIND if action.startswith(_KIND_PREFIX) else _ADMINS_ONLY)


def is_allowed(caller: Caller, action: str, project: str | None) -> bool:
    """Returns True if a caller may do an action in a project.

    Args:
        caller: The caller.
        action: See `RULES`.
        project: Project that the action touches, `projects/{project}` or `projects/*` for all; None if the request names
            none, or if the projects of its objects are checked one by one.
    """
    found = rule(action)
    if not found.allows(caller.role):
        return False
    if found.scope is Scope.DEPLOYMENT:
        project = ALL_PROJECTS
    return project is None or caller.may_access(project)


def require(caller: Caller, action: str, project: str | None = None) -> None:
    """Checks that a caller may do an action in a project; see `is_allowed`.

    Raises:
        PermissionDenied: If it may not. Names the rule, and the token that would be allowed.
    """
    if is_allowed(caller, action, project):
        return
    found, shown = rule(action), action.removeprefix("/")
    if not found.allows(caller.role):
        roles = ", ".join(sorted(role for role in Role if found.allows(role)))
        text = f"A token of role {caller.role} may not use {shown}. Use a token of role {roles}."
    elif found.scope is Scope.DEPLOYMENT:
        text = f"{shown} affects all projects. Use a token for all projects."
    else:
        text = f"The token belongs to another project. Use a token of {(project or '')[:_MAX_NAME]}."
    raise PermissionDenied(text, role=caller.role)
