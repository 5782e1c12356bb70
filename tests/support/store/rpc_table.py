"""Every rpc of the store: how it is asked for a thing by name, how it lists, and who may call it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import rollout_name, runner_name, training_run_name, uuid7
from fulmen.keda import externalscaler_pb2
from fulmen.store.v1 import (
    annotation_service_pb2,
    audit_service_pb2,
    call_service_pb2,
    lease_pb2,
    lease_service_pb2,
    peer_service_pb2,
    project_service_pb2,
    queue_service_pb2,
    resource_pb2,
    resource_service_pb2,
    rollout_changes_pb2,
    rollout_pb2,
    rollout_selection_pb2,
    rollout_service_pb2,
    run_lease_service_pb2,
    runner_registry_service_pb2,
    schedule_service_pb2,
    secret_service_pb2,
    span_pb2,
    span_service_pb2,
    usage_service_pb2,
)
from fulmen.store.v1 import effect_service_pb2 as effects
from fulmen.store.v1 import proxy_service_pb2 as prx
from fulmen.store.v1 import rollout_comparison_pb2 as cmp
from fulmen.store.v1 import run_history_service_pb2 as hist
from fulmen.store.v1 import stored_response_service_pb2 as stored
from tests.support.store.calls import new_call

__all__ = [
    "EXPORT",
    "LISTINGS",
    "PROBES",
    "QUEUES",
    "ROLLOUTS",
    "SPANS",
    "Things",
    "absent",
    "chunk_of",
    "export_of",
    "scaled_object",
]

ROLLOUTS, LEASES, SPANS = (f"/fulmen.store.v1.{name}Service/" for name in ("Rollout", "Lease", "Span"))
RESOURCES, RUNNERS, PROJECTS, QUEUES = (
    f"/fulmen.store.v1.{name}Service/" for name in ("Resource", "RunnerRegistry", "Project", "Queue")
)
USAGE = "/fulmen.store.v1.UsageService/"
RUN_LEASES = "/fulmen.store.v1.RunLeaseService/"
PROXIES = "/fulmen.store.v1.ProxyService/"
SCALER = "/externalscaler.ExternalScaler/"
SECRETS = "/fulmen.store.v1.SecretService/"
HISTORY = "/fulmen.store.v1.RunHistoryService/"
SCHEDULES = "/fulmen.store.v1.ScheduleService/"
ANNOTATIONS = "/fulmen.store.v1.AnnotationService/"
AUDIT = "/fulmen.store.v1.AuditService/"
CALLS = "/fulmen.store.v1.CallService/"
STORED = "/fulmen.store.v1.StoredResponseService/"
EFFECTS = "/fulmen.store.v1.EffectService/"
NOTIFY = "/fulmen.store.v1.PeerService/Notify"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Things:
    """Names of things: those of project b, or such as nobody has."""

    project: str
    waiting: str
    running: str
    attempt: str
    session: str
    resource: str
    token_id: str
    token: str

    @property
    def run(self) -> str:
        """A training run of the project."""
        return training_run_name(self.project, "b")


def absent() -> Things:
    """Returns names that nobody has."""
    running = rollout_name("projects/nobody", uuid7())
    return Things(
        project="projects/nobody",
        waiting=rollout_name("projects/nobody", uuid7()),
        running=running,
        attempt=f"{running}/attempts/1",
        session=str(uuid7()),
        resource="resources/nobody",
        token_id="n" * 21 + "A",
        token="nobody.has.it",
    )


def result_of(things: Things) -> lease_pb2.AttemptResult:
    """Returns the report of an attempt."""
    return lease_pb2.AttemptResult(attempt=things.attempt, lease_id=things.session, epoch=1)


def chunk_of(things: Things) -> span_pb2.SpanChunk:
    """Returns a chunk of one span of an attempt."""
    return span_pb2.SpanChunk(
        attempt=things.attempt,
        chunk_id=str(uuid.UUID(int=7)),
        span_count=1,
        codec=span_pb2.SPAN_CODEC_IDENTITY,
        payload=span_pb2.SpanBatch(spans=[span_pb2.SpanRecord(scope="x")]).SerializeToString(),
    )


def window_of(things: Things) -> usage_service_pb2.LimitWindow:
    """Returns what a proxy says of an attempt's limit."""
    return usage_service_pb2.LimitWindow(project=things.project, attempt=things.attempt, request_counts=[1])


def export_of(things: Things) -> trace_service_pb2.ExportTraceServiceRequest:
    """Returns an export of one span of an attempt."""
    span = trace_pb2.Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="x")
    span.attributes.add(key="fulmen.rollout").value.string_value = things.running
    span.attributes.add(key="fulmen.attempt").value.int_value = 1
    request = trace_service_pb2.ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.append(span)
    return request


def opened(**fields_of_open: Any) -> lease_service_pb2.StreamLeasesRequest:
    """Returns the first message of a runner."""
    return lease_service_pb2.StreamLeasesRequest(open=lease_service_pb2.OpenSession(**fields_of_open))


def scaled_object(**metadata: str) -> externalscaler_pb2.ScaledObjectRef:
    """Returns what KEDA says of a ScaledObject."""
    return externalscaler_pb2.ScaledObjectRef(name="runners", namespace="fulmen", scalerMetadata=metadata)


def new_version(things: Things, **changes: Any) -> resource_pb2.ResourceVersion:
    """Returns a version to publish."""
    return resource_pb2.ResourceVersion(**({"name": things.resource, "kind": "bundle"} | changes))


ANY = cmp.RolloutSide()
run_leases, sch, TTL = run_lease_service_pb2, schedule_service_pb2, Duration(seconds=10)
pb, leases, res, prj = rollout_service_pb2, lease_service_pb2, resource_service_pb2, project_service_pb2
sec, calls, sel = secret_service_pb2, call_service_pb2, rollout_selection_pb2
changes = rollout_changes_pb2
ann, aud = annotation_service_pb2, audit_service_pb2
Probe = Callable[[Things], Sequence[Message]]

# What can be asked for by name, per rpc: the messages of one call.
PROBES: dict[str, list[Probe]] = {
    ROLLOUTS + "BatchCreateRollouts": [
        lambda t: [pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=t.project)])],
    ],
    ROLLOUTS + "StreamCreateRollouts": [
        lambda t: [pb.StreamCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(project=t.project)])],
    ],
    ROLLOUTS + "GetRollout": [
        lambda t: [pb.GetRolloutRequest(name=t.waiting)],
        lambda t: [pb.GetRolloutRequest(name=t.running)],
    ],
    ROLLOUTS + "ListAttempts": [
        lambda t: [pb.ListAttemptsRequest(parent=t.waiting)],
        lambda t: [pb.ListAttemptsRequest(parent=t.running)],
    ],
    ROLLOUTS + "ListRollouts": [lambda t: [pb.ListRolloutsRequest(project=t.project)]],
    ROLLOUTS + "CountRollouts": [
        lambda t: [sel.CountRolloutsRequest(project=t.project)],
        lambda t: [sel.CountRolloutsRequest(training_run=t.run, project=t.project)],
        lambda t: [sel.CountRolloutsRequest(training_run=t.run)],
    ],
    ROLLOUTS + "CompareRollouts": [
        lambda t: [cmp.CompareRolloutsRequest(project=t.project, baseline=ANY, candidate=ANY)],
        lambda t: [cmp.CompareRolloutsRequest(baseline=cmp.RolloutSide(training_run=t.run), candidate=ANY)],
    ],
    ROLLOUTS + "UpdateRollout": [
        lambda t: [sel.UpdateRolloutRequest(rollout=rollout_pb2.Rollout(name=t.waiting, priority=1))],
        lambda t: [sel.UpdateRolloutRequest(rollout=rollout_pb2.Rollout(name=t.running, priority=1))],
    ],
    ROLLOUTS + "CancelRollouts": [
        lambda t: [pb.CancelRolloutsRequest(names=[t.waiting])],
        lambda t: [pb.CancelRolloutsRequest(names=[t.running])],
        lambda t: [pb.CancelRolloutsRequest(training_run=t.run, project=t.project)],
        lambda t: [pb.CancelRolloutsRequest(training_run=t.run)],
    ],
    ROLLOUTS + "RetryRollouts": [
        lambda t: [pb.RetryRolloutsRequest(names=[t.waiting], request_id="r")],
        lambda t: [pb.RetryRolloutsRequest(project=t.project, filter='state = "FAILED"')],
    ],
    ROLLOUTS + "DeleteRollouts": [
        lambda t: [sel.DeleteRolloutsRequest(names=[t.waiting])],
        lambda t: [sel.DeleteRolloutsRequest(filter="*", project=t.project)],
        lambda t: [sel.DeleteRolloutsRequest(filter="*", training_run=t.run)],
    ],
    ROLLOUTS + "WatchRollouts": [lambda t: [pb.WatchRolloutsRequest(project=t.project)]],
    ROLLOUTS + "WatchRolloutChanges": [
        lambda t: [changes.WatchRolloutChangesRequest(project=t.project)],
        lambda t: [changes.WatchRolloutChangesRequest(training_run=t.run)],
    ],
    ROLLOUTS + "GetQueueStats": [lambda t: [pb.GetQueueStatsRequest(project=t.project)]],
    ROLLOUTS + "PauseQueue": [lambda t: [pb.PauseQueueRequest(project=t.project)]],
    ROLLOUTS + "ResumeQueue": [lambda t: [pb.ResumeQueueRequest(project=t.project)]],
    LEASES + "StreamLeases": [
        lambda t: [opened(projects=[t.project])],
        lambda t: [opened(runner=runner_name(t.session))],
        lambda t: [opened(runner=runner_name(t.session), running_attempts=[t.attempt])],
        lambda t: [opened(), leases.StreamLeasesRequest(complete=leases.CompletedAttempts(results=[result_of(t)]))],
        lambda t: [opened(), leases.StreamLeasesRequest(release=leases.ReleasedAttempts(attempts=[t.attempt]))],
    ],
    LEASES + "AcquireLeases": [lambda t: [leases.AcquireLeasesRequest(runner=runner_name(t.session), max_count=1)]],
    LEASES + "RenewLeases": [lambda t: [leases.RenewLeasesRequest(runner=runner_name(t.session))]],
    LEASES + "CompleteAttempts": [lambda t: [leases.CompleteAttemptsRequest(results=[result_of(t)])]],
    LEASES + "ReleaseLeases": [
        lambda t: [leases.ReleaseLeasesRequest(runner=runner_name(t.session))],
        lambda t: [leases.ReleaseLeasesRequest(runner=runner_name(t.session), attempts=[t.attempt])],
    ],
    LEASES + "CheckAttempts": [
        lambda t: [leases.CheckAttemptsRequest(attempts=[leases.AttemptCheck(attempt=t.attempt)])],
        lambda t: [leases.CheckAttemptsRequest(attempts=[leases.AttemptCheck(attempt=t.attempt, epoch=1)])],
    ],
    SPANS + "AppendSpans": [lambda t: [span_service_pb2.AppendSpansRequest(chunks=[chunk_of(t)])]],
    SPANS + "ListSpans": [
        lambda t: [span_service_pb2.ListSpansRequest(parent=t.running)],
        lambda t: [span_service_pb2.ListSpansRequest(parent=t.attempt)],
        lambda t: [span_service_pb2.ListSpansRequest(parents=[t.attempt])],
    ],
    SPANS + "StreamSpans": [
        lambda t: [span_service_pb2.StreamSpansRequest(parents=[t.running])],
        lambda t: [span_service_pb2.StreamSpansRequest(training_run=t.run, project=t.project)],
        lambda t: [span_service_pb2.StreamSpansRequest(training_run=t.run)],
    ],
    SPANS + "WatchSpans": [
        lambda t: [span_service_pb2.WatchSpansRequest(parent=t.running)],
        lambda t: [span_service_pb2.WatchSpansRequest(parent=t.attempt)],
    ],
    RESOURCES + "PublishResources": [
        lambda t: [res.PublishResourcesRequest(resources=[new_version(t, project=t.project)])],
    ],
    RESOURCES + "GetResources": [
        lambda t: [res.GetResourcesRequest(names=[t.resource])],
        lambda t: [res.GetResourcesRequest(names=[t.resource], project=t.project)],
    ],
    RESOURCES + "ReadContent": [
        lambda t: [res.ReadContentRequest(name=f"{t.resource}/versions/1")],
        lambda t: [res.ReadContentRequest(name=f"{t.resource}/versions/1", project=t.project)],
    ],
    RESOURCES + "ListResourceVersions": [
        lambda t: [res.ListResourceVersionsRequest(parent=t.resource)],
        lambda t: [res.ListResourceVersionsRequest(project=t.project)],
    ],
    RESOURCES + "DiffResources": [
        lambda t: [res.DiffResourcesRequest(base=f"{t.resource}/versions/1", target=f"{t.resource}/versions/1")],
        lambda t: [res.DiffResourcesRequest(base=t.resource, target=t.resource, project=t.project)],
    ],
    RESOURCES + "SetAlias": [
        lambda t: [res.SetAliasRequest(name=f"{t.resource}/aliases/best", version=1)],
        lambda t: [res.SetAliasRequest(name=f"{t.resource}/aliases/best", version=1, project=t.project)],
    ],
    RESOURCES + "WatchResources": [lambda t: [res.WatchResourcesRequest(project=t.project)]],
    RUNNERS + "GetRunner": [lambda t: [runner_registry_service_pb2.GetRunnerRequest(name=runner_name(t.session))]],
    RUNNERS + "SetRunnerSlots": [
        lambda t: [runner_registry_service_pb2.SetRunnerSlotsRequest(name=runner_name(t.session), slot_count=3)],
    ],
    RUNNERS + "DrainRunner": [
        lambda t: [runner_registry_service_pb2.DrainRunnerRequest(name=runner_name(t.session))],
    ],
    QUEUES + "WatchQueueStats": [
        lambda t: [queue_service_pb2.WatchQueueStatsRequest(project=t.project)],
        lambda t: [queue_service_pb2.WatchQueueStatsRequest(training_run=t.run)],
    ],
    RUNNERS + "GetFleetDemand": [
        lambda t: [runner_registry_service_pb2.GetFleetDemandRequest(project=t.project)],
    ],
    SCALER + "IsActive": [lambda t: [scaled_object(project=t.project)]],
    SCALER + "StreamIsActive": [lambda t: [scaled_object(project=t.project)]],
    SCALER + "GetMetricSpec": [lambda t: [scaled_object(project=t.project)]],
    SCALER + "GetMetrics": [
        lambda t: [externalscaler_pb2.GetMetricsRequest(scaledObjectRef=scaled_object(project=t.project))],
    ],
    PROJECTS + "CreateProject": [lambda t: [prj.CreateProjectRequest(project=prj.Project(name=t.project))]],
    PROJECTS + "GetProject": [lambda t: [prj.GetProjectRequest(name=t.project)]],
    PROJECTS + "UpdateProject": [lambda t: [prj.UpdateProjectRequest(project=prj.Project(name=t.project, etag="1"))]],
    PROJECTS + "DeleteProject": [lambda t: [prj.DeleteProjectRequest(name=t.project, cancel_running=True)]],
    PROJECTS + "ResumeAgent": [lambda t: [prj.ResumeAgentRequest(project=t.project, agent=f"{t.resource}/versions/1")]],
    PROJECTS + "IssueToken": [
        lambda t: [
            prj.IssueTokenRequest(
                project=t.project, role=prj.TOKEN_ROLE_ENGINE, subject="x", training_run=f"{t.project}/trainingRuns/x"
            )
        ],
    ],
    PROJECTS + "RevokeToken": [lambda t: [prj.RevokeTokenRequest(token_id=t.token_id)]],
    PROJECTS + "RefreshToken": [lambda t: [prj.RefreshTokenRequest(project=t.project)]],
    PROJECTS + "IntrospectToken": [lambda t: [prj.IntrospectTokenRequest(token=t.token)]],
    PROJECTS + "ListTokens": [lambda t: [prj.ListTokensRequest(project=t.project)]],
    USAGE + "GetUsage": [
        lambda t: [usage_service_pb2.GetUsageRequest(project=t.project)],
        lambda t: [usage_service_pb2.GetUsageRequest(rollout=t.running)],
        lambda t: [usage_service_pb2.GetUsageRequest(training_run=t.run, project=t.project)],
        lambda t: [usage_service_pb2.GetUsageRequest(training_run=t.run)],
    ],
    USAGE + "GetUsageSeries": [
        lambda t: [usage_service_pb2.GetUsageSeriesRequest(project=t.project)],
        lambda t: [usage_service_pb2.GetUsageSeriesRequest(training_run=t.run, project=t.project)],
        lambda t: [usage_service_pb2.GetUsageSeriesRequest(training_run=t.run)],
    ],
    AUDIT + "ListAuditEntries": [lambda t: [aud.ListAuditEntriesRequest(project=t.project)]],
    ANNOTATIONS + "CreateAnnotation": [
        lambda t: [ann.CreateAnnotationRequest(annotation=ann.Annotation(rollout=t.waiting, value=1))]
    ],
    ANNOTATIONS + "UpdateAnnotation": [
        lambda t: [ann.UpdateAnnotationRequest(annotation=ann.Annotation(name=f"{t.project}/annotations/{uuid7()}"))]
    ],
    ANNOTATIONS + "DeleteAnnotation": [
        lambda t: [ann.DeleteAnnotationRequest(name=f"{t.project}/annotations/{uuid7()}")]
    ],
    ANNOTATIONS + "ListAnnotations": [
        lambda t: [ann.ListAnnotationsRequest(project=t.project)],
        lambda t: [ann.ListAnnotationsRequest(rollout=t.waiting)],
    ],
    ANNOTATIONS + "GetAgreement": [lambda t: [ann.GetAgreementRequest(project=t.project)]],
    USAGE + "SyncUsage": [
        lambda t: [usage_service_pb2.SyncUsageRequest(instance_id="i", windows=[window_of(t)])],
    ],
    PROXIES + "SyncProxy": [
        lambda t: [prx.SyncProxyRequest(instance_id="i", accounts=[prx.CaptureAccount(attempt=t.attempt, open=True)])],
    ],
    PROXIES + "GetCaptureTotals": [lambda t: [prx.GetCaptureTotalsRequest(attempts=[t.attempt])]],
    SECRETS + "SetSecret": [
        lambda t: [sec.SetSecretRequest(project=t.project, name="WEATHER_KEY", value=b"sunny-and-warm")],
        lambda t: [sec.SetSecretRequest(project=t.project, name="openai", value=b"x" * 8, hosts=["api.openai.com"])],
    ],
    SECRETS + "ListSecrets": [lambda t: [sec.ListSecretsRequest(project=t.project)]],
    SECRETS + "DeleteSecret": [
        lambda t: [sec.DeleteSecretRequest(project=t.project, name="WEATHER_KEY")],
        lambda t: [sec.DeleteSecretRequest(project=t.project, name="openai")],
    ],
    SECRETS + "GetAttemptSecrets": [lambda t: [sec.GetAttemptSecretsRequest(attempt=t.attempt, lease_id=t.session)]],
    SECRETS + "GetBackendKeys": [lambda t: [sec.GetBackendKeysRequest(project=t.project)]],
    SCHEDULES + "CreateSchedule": [
        lambda t: [sch.CreateScheduleRequest(schedule=sch.Schedule(name=f"{t.project}/schedules/s", cron="0 3 * * *"))]
    ],
    SCHEDULES + "ListSchedules": [lambda t: [sch.ListSchedulesRequest(project=t.project)]],
    SCHEDULES + "GetSchedule": [lambda t: [sch.GetScheduleRequest(name=f"{t.project}/schedules/s")]],
    SCHEDULES + "PauseSchedule": [lambda t: [sch.PauseScheduleRequest(name=f"{t.project}/schedules/s")]],
    SCHEDULES + "ResumeSchedule": [lambda t: [sch.ResumeScheduleRequest(name=f"{t.project}/schedules/s")]],
    SCHEDULES + "DeleteSchedule": [lambda t: [sch.DeleteScheduleRequest(name=f"{t.project}/schedules/s")]],
    CALLS + "RecordCalls": [lambda t: [calls.RecordCallsRequest(calls=[new_call("x", project=t.project)])]],
    CALLS + "ListCalls": [lambda t: [calls.ListCallsRequest(project=t.project, with_content=True)]],
    CALLS + "GetCall": [lambda t: [calls.GetCallRequest(name=f"{t.project}/calls/{uuid7()}")]],
    CALLS + "ListConversations": [lambda t: [calls.ListConversationsRequest(project=t.project)]],
    CALLS + "DeleteConversations": [
        lambda t: [calls.DeleteConversationsRequest(names=[f"{t.project}/conversations/c"])]
    ],
    CALLS + "RateConversation": [
        lambda t: [calls.RateConversationRequest(name=f"{t.project}/conversations/c", score=1)]
    ],
    EFFECTS + "BeginEffect": [lambda t: [effects.BeginEffectRequest(attempt=t.attempt, name="x", token=t.session)]],
    EFFECTS + "EndEffect": [lambda t: [effects.EndEffectRequest(attempt=t.attempt, name="x", token=t.session)]],
    STORED + "PutStoredResponse": [
        lambda t: [stored.PutStoredResponseRequest(project=t.project, response=stored.StoredResponse(id=t.session))]
    ],
    STORED + "GetStoredResponses": [lambda t: [stored.GetStoredResponsesRequest(project=t.project, id=t.session)]],
    STORED + "DeleteStoredResponse": [lambda t: [stored.DeleteStoredResponseRequest(project=t.project, id=t.session)]],
    HISTORY + "AppendRunHistory": [
        lambda t: [hist.AppendRunHistoryRequest(run_fence=run_leases.RunFence(training_run=t.run, epoch=1))]
    ],
    HISTORY + "GetRunMetrics": [lambda t: [hist.GetRunMetricsRequest(training_runs=[t.run], metrics=["loss"])]],
    HISTORY + "ListRewardDistributions": [lambda t: [hist.ListRewardDistributionsRequest(training_run=t.run)]],
    HISTORY + "ListRunNotices": [lambda t: [hist.ListRunNoticesRequest(training_run=t.run)]],
    RUN_LEASES + "CreateRunLease": [lambda t: [run_leases.CreateRunLeaseRequest(training_run=t.run)]],
    RUN_LEASES + "AcquireRunLease": [
        lambda t: [run_leases.AcquireRunLeaseRequest(training_run=t.run, owner="o", owner_address="h:1", ttl=TTL)],
    ],
    RUN_LEASES + "RenewRunLeases": [
        lambda t: [
            run_leases.RenewRunLeasesRequest(
                owner="o",
                owner_address="h:1",
                ttl=TTL,
                leases=[run_leases.RenewedLease(training_run=t.run, epoch=1)],
            )
        ],
    ],
    RUN_LEASES + "ReleaseRunLease": [
        lambda t: [
            run_leases.ReleaseRunLeaseRequest(training_run=t.run, epoch=1, state=run_leases.RUN_LEASE_STATE_IDLE)
        ],
    ],
    RUN_LEASES + "ListRunLeases": [lambda t: [run_leases.ListRunLeasesRequest(project=t.project)]],
    NOTIFY: [
        lambda t: [
            peer_service_pb2.NotifyRequest(
                cancels=[peer_service_pb2.CancelHint(runner=runner_name(t.session), attempt=t.attempt)]
            )
        ],
    ],
    EXPORT: [lambda t: [export_of(t)]],
}

# What is asked for without a name: the same is told whether project b has things or not.
LISTINGS: dict[str, Message] = {
    ROLLOUTS + "ListRollouts": pb.ListRolloutsRequest(),
    ROLLOUTS + "CountRollouts": sel.CountRolloutsRequest(),
    ROLLOUTS + "CompareRollouts": cmp.CompareRolloutsRequest(baseline=ANY, candidate=ANY),
    ROLLOUTS + "GetQueueStats": pb.GetQueueStatsRequest(),
    RESOURCES + "ListResourceVersions": res.ListResourceVersionsRequest(),
    RESOURCES + "WatchResources": res.WatchResourcesRequest(),
    QUEUES + "ListQueues": queue_service_pb2.ListQueuesRequest(),
    QUEUES + "WatchQueueStats": queue_service_pb2.WatchQueueStatsRequest(),
    RUNNERS + "ListRunners": runner_registry_service_pb2.ListRunnersRequest(),
    RUNNERS + "WatchRunners": runner_registry_service_pb2.WatchRunnersRequest(),
    RUNNERS + "GetFleetDemand": runner_registry_service_pb2.GetFleetDemandRequest(),
    PROJECTS + "GetProject": prj.GetProjectRequest(),
    PROJECTS + "ListProjects": prj.ListProjectsRequest(),
    PROJECTS + "ListTokens": prj.ListTokensRequest(),
    PROJECTS + "ListRevokedTokens": prj.ListRevokedTokensRequest(),
    PROJECTS + "ListSigningKeys": prj.ListSigningKeysRequest(),
    USAGE + "GetUsage": usage_service_pb2.GetUsageRequest(),
    USAGE + "GetUsageSeries": usage_service_pb2.GetUsageSeriesRequest(),
    AUDIT + "ListAuditEntries": aud.ListAuditEntriesRequest(),
    ANNOTATIONS + "ListAnnotations": ann.ListAnnotationsRequest(),
    ANNOTATIONS + "GetAgreement": ann.GetAgreementRequest(),
    CALLS + "ListCalls": calls.ListCallsRequest(),
    CALLS + "ListConversations": calls.ListConversationsRequest(),
    SECRETS + "ListSecrets": sec.ListSecretsRequest(),
    SCHEDULES + "ListSchedules": sch.ListSchedulesRequest(),
    SECRETS + "GetBackendKeys": sec.GetBackendKeysRequest(),
    RUN_LEASES + "ListRunLeases": run_leases.ListRunLeasesRequest(),
}
