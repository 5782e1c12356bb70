"""Which rpcs the gateway forwards: those that people and tools call, without streams of requests, which browsers cannot send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from fulmen.algorithm.v1 import (
    gradient_exchange_service_pb2,
    trainer_service_pb2,
    training_run_service_pb2,
    weight_service_pb2,
)
from fulmen.llm_proxy.v1 import backend_service_pb2, completion_service_pb2, route_service_pb2
from fulmen.store.v1 import (
    annotation_service_pb2,
    audit_service_pb2,
    call_service_pb2,
    project_service_pb2,
    queue_service_pb2,
    resource_service_pb2,
    rollout_service_pb2,
    run_history_service_pb2,
    run_lease_service_pb2,
    runner_registry_service_pb2,
    schedule_service_pb2,
    secret_service_pb2,
    span_service_pb2,
    usage_service_pb2,
)

__all__ = ["FORWARDED", "LEFT_OUT", "Target", "forwarded_methods"]


class Target(StrEnum):
    """A service that rpcs are forwarded to."""

    STORE = "store"
    LLM_PROXY = "llm_proxy"
    ALGORITHM = "algorithm"


FORWARDED: Final[Mapping[Target, tuple[ServiceDescriptor, ...]]] = {
    Target.STORE: (
        rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"],
        queue_service_pb2.DESCRIPTOR.services_by_name["QueueService"],
        span_service_pb2.DESCRIPTOR.services_by_name["SpanService"],
        resource_service_pb2.DESCRIPTOR.services_by_name["ResourceService"],
        runner_registry_service_pb2.DESCRIPTOR.services_by_name["RunnerRegistryService"],
        project_service_pb2.DESCRIPTOR.services_by_name["ProjectService"],
        usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"],
        call_service_pb2.DESCRIPTOR.services_by_name["CallService"],
        annotation_service_pb2.DESCRIPTOR.services_by_name["AnnotationService"],
        audit_service_pb2.DESCRIPTOR.services_by_name["AuditService"],
        schedule_service_pb2.DESCRIPTOR.services_by_name["ScheduleService"],
        secret_service_pb2.DESCRIPTOR.services_by_name["SecretService"],
        run_history_service_pb2.DESCRIPTOR.services_by_name["RunHistoryService"],
        run_lease_service_pb2.DESCRIPTOR.services_by_name["RunLeaseService"],
    ),
    Target.LLM_PROXY: (
        route_service_pb2.DESCRIPTOR.services_by_name["RouteService"],
        backend_service_pb2.DESCRIPTOR.services_by_name["BackendService"],
        completion_service_pb2.DESCRIPTOR.services_by_name["CompletionService"],
    ),
    Target.ALGORITHM: (
        training_run_service_pb2.DESCRIPTOR.services_by_name["TrainingRunService"],
        trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"],
        weight_service_pb2.DESCRIPTOR.services_by_name["WeightService"],
        gradient_exchange_service_pb2.DESCRIPTOR.services_by_name["GradientExchangeService"],
    ),
}
"""Services by where they run. What `LEFT_OUT` names is not forwarded."""

_FOR_SERVICES: Final = "called by services"
_FOR_RUNNERS: Final = "called by runners"
_BULK: Final = "moves weights or gradients"
_REQUEST_STREAM: Final = "a stream of requests"

LEFT_OUT: Final[Mapping[str, str]] = {
    "fulmen.store.v1.RolloutService.StreamCreateRollouts": _REQUEST_STREAM,
    "fulmen.store.v1.SpanService.AppendSpans": _FOR_RUNNERS,
    "fulmen.store.v1.ProjectService.IntrospectToken": _FOR_SERVICES,
    "fulmen.store.v1.ProjectService.RefreshToken": _FOR_SERVICES,
    "fulmen.store.v1.ProjectService.ListRevokedTokens": _FOR_SERVICES,
    "fulmen.store.v1.UsageService.SyncUsage": _FOR_SERVICES,
    "fulmen.store.v1.CallService.RecordCalls": _FOR_SERVICES,
    "fulmen.store.v1.SecretService.GetAttemptSecrets": "values of secrets",
    "fulmen.store.v1.SecretService.GetBackendKeys": "values of secrets",
    "fulmen.store.v1.RunLeaseService.CreateRunLease": _FOR_SERVICES,
    "fulmen.store.v1.RunLeaseService.AcquireRunLease": _FOR_SERVICES,
    "fulmen.store.v1.RunLeaseService.RenewRunLeases": _FOR_SERVICES,
    "fulmen.store.v1.RunLeaseService.ReleaseRunLease": _FOR_SERVICES,
    "fulmen.store.v1.RunHistoryService.AppendRunHistory": _FOR_SERVICES,
    "fulmen.algorithm.v1.WeightService.BeginUpload": _BULK,
    "fulmen.algorithm.v1.WeightService.UploadChunks": _REQUEST_STREAM,
    "fulmen.algorithm.v1.WeightService.CommitUpload": _BULK,
    "fulmen.algorithm.v1.WeightService.GetWeights": _BULK,
    "fulmen.algorithm.v1.WeightService.DownloadChunks": _BULK,
    "fulmen.algorithm.v1.GradientExchangeService.Join": _FOR_SERVICES,
    "fulmen.algorithm.v1.GradientExchangeService.Leave": _FOR_SERVICES,
    "fulmen.algorithm.v1.GradientExchangeService.Exchange": _BULK,
    # Whole services.
    "fulmen.store.v1.LeaseService": _FOR_RUNNERS,
    "fulmen.store.v1.PeerService": _FOR_SERVICES,
    "fulmen.store.v1.ProxyService": _FOR_SERVICES,
    "fulmen.store.v1.StoredResponseService": "called by the proxy, which serves stored responses itself",
    "fulmen.store.v1.EffectService": "called by the proxy, which serves agents itself",
    "fulmen.llm_proxy.v1.CaptureService": _FOR_RUNNERS,
    "fulmen.algorithm.v1.EngineService": "called by engines",
    "fulmen.algorithm.v1.RankService": "called by machines of a run",
    "fulmen.runner.v1.RunnerService": "runners are not reachable from outside; see RunnerRegistryService",
}
"""Rpcs and services that are not forwarded, and why."""


def forwarded_methods(target: Target) -> Iterator[MethodDescriptor]:
    """Yields the rpcs of a service that are forwarded."""
    for service in FORWARDED[target]:
        for method in service.methods:
            if method.full_name not in LEFT_OUT:
                yield method
