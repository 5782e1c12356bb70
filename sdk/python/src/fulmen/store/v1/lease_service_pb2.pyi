from fulmen.store.v1 import attempt_pb2 as _attempt_pb2
from fulmen.store.v1 import lease_pb2 as _lease_pb2
from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_STATUS_UNSPECIFIED: _ClassVar[AttemptStatus]
    ATTEMPT_STATUS_LIVE: _ClassVar[AttemptStatus]
    ATTEMPT_STATUS_ENDED: _ClassVar[AttemptStatus]
    ATTEMPT_STATUS_STALE_EPOCH: _ClassVar[AttemptStatus]
    ATTEMPT_STATUS_CANCEL_REQUESTED: _ClassVar[AttemptStatus]
    ATTEMPT_STATUS_NOT_FOUND: _ClassVar[AttemptStatus]
ATTEMPT_STATUS_UNSPECIFIED: AttemptStatus
ATTEMPT_STATUS_LIVE: AttemptStatus
ATTEMPT_STATUS_ENDED: AttemptStatus
ATTEMPT_STATUS_STALE_EPOCH: AttemptStatus
ATTEMPT_STATUS_CANCEL_REQUESTED: AttemptStatus
ATTEMPT_STATUS_NOT_FOUND: AttemptStatus

class StreamLeasesRequest(_message.Message):
    __slots__ = ("open", "add_credits", "renew", "complete", "release")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADD_CREDITS_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    add_credits: AddCredits
    renew: RenewSession
    complete: CompletedAttempts
    release: ReleasedAttempts
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., add_credits: _Optional[_Union[AddCredits, _Mapping]] = ..., renew: _Optional[_Union[RenewSession, _Mapping]] = ..., complete: _Optional[_Union[CompletedAttempts, _Mapping]] = ..., release: _Optional[_Union[ReleasedAttempts, _Mapping]] = ...) -> None: ...

class StreamLeasesResponse(_message.Message):
    __slots__ = ("opened", "assign", "ack", "cancel", "lease_lost", "drain", "order")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    LEASE_LOST_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    assign: AssignedAttempts
    ack: AcknowledgedAttempts
    cancel: CancelledAttempts
    lease_lost: LostLeases
    drain: DrainNotice
    order: _lease_pb2.RunnerOrder
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., assign: _Optional[_Union[AssignedAttempts, _Mapping]] = ..., ack: _Optional[_Union[AcknowledgedAttempts, _Mapping]] = ..., cancel: _Optional[_Union[CancelledAttempts, _Mapping]] = ..., lease_lost: _Optional[_Union[LostLeases, _Mapping]] = ..., drain: _Optional[_Union[DrainNotice, _Mapping]] = ..., order: _Optional[_Union[_lease_pb2.RunnerOrder, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("runner", "info", "running_attempts", "projects")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTS_FIELD_NUMBER: _ClassVar[int]
    runner: str
    info: _lease_pb2.RunnerInfo
    running_attempts: _containers.RepeatedScalarFieldContainer[str]
    projects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runner: _Optional[str] = ..., info: _Optional[_Union[_lease_pb2.RunnerInfo, _Mapping]] = ..., running_attempts: _Optional[_Iterable[str]] = ..., projects: _Optional[_Iterable[str]] = ...) -> None: ...

class AddCredits(_message.Message):
    __slots__ = ("credit_count",)
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    credit_count: int
    def __init__(self, credit_count: _Optional[int] = ...) -> None: ...

class RenewSession(_message.Message):
    __slots__ = ("load", "progress", "done_order")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_ORDER_FIELD_NUMBER: _ClassVar[int]
    load: _lease_pb2.RunnerLoad
    progress: _containers.RepeatedCompositeFieldContainer[ReportedProgress]
    done_order: int
    def __init__(self, load: _Optional[_Union[_lease_pb2.RunnerLoad, _Mapping]] = ..., progress: _Optional[_Iterable[_Union[ReportedProgress, _Mapping]]] = ..., done_order: _Optional[int] = ...) -> None: ...

class ReportedProgress(_message.Message):
    __slots__ = ("attempt", "progress")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    progress: _attempt_pb2.AttemptProgress
    def __init__(self, attempt: _Optional[str] = ..., progress: _Optional[_Union[_attempt_pb2.AttemptProgress, _Mapping]] = ...) -> None: ...

class CompletedAttempts(_message.Message):
    __slots__ = ("results", "credit_count")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_lease_pb2.AttemptResult]
    credit_count: int
    def __init__(self, results: _Optional[_Iterable[_Union[_lease_pb2.AttemptResult, _Mapping]]] = ..., credit_count: _Optional[int] = ...) -> None: ...

class ReleasedAttempts(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("runner", "lease_ttl", "lost_attempts")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    LOST_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    runner: str
    lease_ttl: _duration_pb2.Duration
    lost_attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runner: _Optional[str] = ..., lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lost_attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class AssignedAttempts(_message.Message):
    __slots__ = ("assignments",)
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[_lease_pb2.Assignment]
    def __init__(self, assignments: _Optional[_Iterable[_Union[_lease_pb2.Assignment, _Mapping]]] = ...) -> None: ...

class AcknowledgedAttempts(_message.Message):
    __slots__ = ("acks",)
    ACKS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[_lease_pb2.CompletionAck]
    def __init__(self, acks: _Optional[_Iterable[_Union[_lease_pb2.CompletionAck, _Mapping]]] = ...) -> None: ...

class CancelledAttempts(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class LostLeases(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainNotice(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("runner", "info", "max_count", "wait")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    runner: str
    info: _lease_pb2.RunnerInfo
    max_count: int
    wait: _duration_pb2.Duration
    def __init__(self, runner: _Optional[str] = ..., info: _Optional[_Union[_lease_pb2.RunnerInfo, _Mapping]] = ..., max_count: _Optional[int] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireLeasesResponse(_message.Message):
    __slots__ = ("assignments", "runner", "lease_ttl")
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[_lease_pb2.Assignment]
    runner: str
    lease_ttl: _duration_pb2.Duration
    def __init__(self, assignments: _Optional[_Iterable[_Union[_lease_pb2.Assignment, _Mapping]]] = ..., runner: _Optional[str] = ..., lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("runner", "load")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    runner: str
    load: _lease_pb2.RunnerLoad
    def __init__(self, runner: _Optional[str] = ..., load: _Optional[_Union[_lease_pb2.RunnerLoad, _Mapping]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("lease_ttl", "cancelled_attempts", "held_attempts")
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HELD_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    lease_ttl: _duration_pb2.Duration
    cancelled_attempts: _containers.RepeatedScalarFieldContainer[str]
    held_attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., cancelled_attempts: _Optional[_Iterable[str]] = ..., held_attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class CompleteAttemptsRequest(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_lease_pb2.AttemptResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_lease_pb2.AttemptResult, _Mapping]]] = ...) -> None: ...

class CompleteAttemptsResponse(_message.Message):
    __slots__ = ("acks",)
    ACKS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[_lease_pb2.CompletionAck]
    def __init__(self, acks: _Optional[_Iterable[_Union[_lease_pb2.CompletionAck, _Mapping]]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("runner", "attempts")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    runner: str
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runner: _Optional[str] = ..., attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("released_count",)
    RELEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    released_count: int
    def __init__(self, released_count: _Optional[int] = ...) -> None: ...

class CheckAttemptsRequest(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptCheck]
    def __init__(self, attempts: _Optional[_Iterable[_Union[AttemptCheck, _Mapping]]] = ...) -> None: ...

class AttemptCheck(_message.Message):
    __slots__ = ("attempt", "epoch")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    epoch: int
    def __init__(self, attempt: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CheckAttemptsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AttemptCheckResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AttemptCheckResult, _Mapping]]] = ...) -> None: ...

class AttemptCheckResult(_message.Message):
    __slots__ = ("attempt", "status", "state", "project", "mode", "current_epoch", "training_run", "agent")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    status: AttemptStatus
    state: _attempt_pb2.AttemptState
    project: str
    mode: _rollout_pb2.RolloutMode
    current_epoch: int
    training_run: str
    agent: str
    def __init__(self, attempt: _Optional[str] = ..., status: _Optional[_Union[AttemptStatus, str]] = ..., state: _Optional[_Union[_attempt_pb2.AttemptState, str]] = ..., project: _Optional[str] = ..., mode: _Optional[_Union[_rollout_pb2.RolloutMode, str]] = ..., current_epoch: _Optional[int] = ..., training_run: _Optional[str] = ..., agent: _Optional[str] = ...) -> None: ...
