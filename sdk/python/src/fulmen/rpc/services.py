"""A channel to each service, with its generated stubs; no class here mirrors an rpc.

Stubs raise the classes of `fulmen.errors`. A service without a target fails at its first use, not at the start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.algorithm.v1.trainer_service_pb2_grpc import TrainerServiceStub
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.llm_proxy.v1.completion_service_pb2_grpc import CompletionServiceStub
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceStub
from fulmen.rpc.channel import Token, open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen.store.v1.annotation_service_pb2_grpc import AnnotationServiceStub
from fulmen.store.v1.audit_service_pb2_grpc import AuditServiceStub
from fulmen.store.v1.call_service_pb2_grpc import CallServiceStub
from fulmen.store.v1.project_service_pb2_grpc import ProjectServiceStub
from fulmen.store.v1.queue_service_pb2_grpc import QueueServiceStub
from fulmen.store.v1.resource_service_pb2_grpc import ResourceServiceStub
from fulmen.store.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fulmen.store.v1.run_history_service_pb2_grpc import RunHistoryServiceStub
from fulmen.store.v1.run_lease_service_pb2_grpc import RunLeaseServiceStub
from fulmen.store.v1.runner_registry_service_pb2_grpc import RunnerRegistryServiceStub
from fulmen.store.v1.schedule_service_pb2_grpc import ScheduleServiceStub
from fulmen.store.v1.secret_service_pb2_grpc import SecretServiceStub
from fulmen.store.v1.span_service_pb2_grpc import SpanServiceStub
from fulmen.store.v1.usage_service_pb2_grpc import UsageServiceStub

__all__ = ["Services", "Targets", "connect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Addresses of the services, each `host:port`."""

    store: str
    algorithm: str
    llm_proxy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Stubs of all services for people and tools."""

    rollouts: RolloutServiceStub
    queues: QueueServiceStub
    spans: SpanServiceStub
    resources: ResourceServiceStub
    runners: RunnerRegistryServiceStub
    projects: ProjectServiceStub
    usage: UsageServiceStub
    calls: CallServiceStub
    annotations: AnnotationServiceStub
    audit: AuditServiceStub
    secrets: SecretServiceStub
    schedules: ScheduleServiceStub
    run_history: RunHistoryServiceStub
    run_leases: RunLeaseServiceStub
    training_runs: TrainingRunServiceStub
    exchanges: GradientExchangeServiceStub
    weights: WeightServiceStub
    trainers: TrainerServiceStub
    routes: RouteServiceStub
    backends: BackendServiceStub
    completions: CompletionServiceStub

    @classmethod
    def over(cls, *, store: Any, algorithm: Any, llm_proxy: Any) -> Services:
        """Returns the stubs over three channels, which have the interface of `FulmenChannel`."""
        return cls(
            rollouts=RolloutServiceStub(store),
            queues=QueueServiceStub(store),
            spans=SpanServiceStub(store),
            resources=ResourceServiceStub(store),
            runners=RunnerRegistryServiceStub(store),
            projects=ProjectServiceStub(store),
            usage=UsageServiceStub(store),
            calls=CallServiceStub(store),
            annotations=AnnotationServiceStub(store),
            audit=AuditServiceStub(store),
            secrets=SecretServiceStub(store),
            schedules=ScheduleServiceStub(store),
            run_history=RunHistoryServiceStub(store),
            run_leases=RunLeaseServiceStub(store),
            training_runs=TrainingRunServiceStub(algorithm),
            exchanges=GradientExchangeServiceStub(algorithm),
            weights=WeightServiceStub(algorithm),
            trainers=TrainerServiceStub(algorithm),
            routes=RouteServiceStub(llm_proxy),
            backends=BackendServiceStub(llm_proxy),
            completions=CompletionServiceStub(llm_proxy),
        )


@asynccontextmanager
async def connect(targets: Targets, *, token: Token, tls: TlsFiles | None = None) -> AsyncIterator[Services]:
    """Opens one channel per service, each of which connects at its first call; closes them at the end.

    Args:
        targets: addresses of the services.
        token: token for all calls; None for a stack in dev_mode.
        tls: files for TLS; None for no TLS. `TlsFiles.from_environment()` reads FULMEN_TLS_CA_FILE.
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_channel(targets.store, token=token, tls=tls))
        algorithm = await stack.enter_async_context(open_channel(targets.algorithm, token=token, tls=tls))
        llm_proxy = await stack.enter_async_context(open_channel(targets.llm_proxy, token=token, tls=tls))
        yield Services.over(store=store, algorithm=algorithm, llm_proxy=llm_proxy)
