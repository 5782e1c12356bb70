from fulmen.store.v1 import attempt_pb2 as _attempt_pb2
from fulmen.store.v1 import failure_pb2 as _failure_pb2
from fulmen.store.v1 import reward_pb2 as _reward_pb2
from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CompletionStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPLETION_STATUS_UNSPECIFIED: _ClassVar[CompletionStatus]
    COMPLETION_STATUS_APPLIED: _ClassVar[CompletionStatus]
    COMPLETION_STATUS_DUPLICATE: _ClassVar[CompletionStatus]
    COMPLETION_STATUS_LEASE_LOST: _ClassVar[CompletionStatus]
    COMPLETION_STATUS_INVALID: _ClassVar[CompletionStatus]
COMPLETION_STATUS_UNSPECIFIED: CompletionStatus
COMPLETION_STATUS_APPLIED: CompletionStatus
COMPLETION_STATUS_DUPLICATE: CompletionStatus
COMPLETION_STATUS_LEASE_LOST: CompletionStatus
COMPLETION_STATUS_INVALID: CompletionStatus

class Assignment(_message.Message):
    __slots__ = ("attempt", "lease_id", "epoch", "rollout", "attempt_key", "timeout")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    lease_id: str
    epoch: int
    rollout: _rollout_pb2.Rollout
    attempt_key: str
    timeout: _duration_pb2.Duration
    def __init__(self, attempt: _Optional[str] = ..., lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., attempt_key: _Optional[str] = ..., timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AttemptResult(_message.Message):
    __slots__ = ("attempt", "lease_id", "epoch", "failure_kind", "failure_message", "rewards", "output", "output_content_type", "printed")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    PRINTED_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    lease_id: str
    epoch: int
    failure_kind: _failure_pb2.FailureKind
    failure_message: str
    rewards: _containers.RepeatedCompositeFieldContainer[_reward_pb2.Reward]
    output: bytes
    output_content_type: str
    printed: _attempt_pb2.PrintedTail
    def __init__(self, attempt: _Optional[str] = ..., lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., failure_kind: _Optional[_Union[_failure_pb2.FailureKind, str]] = ..., failure_message: _Optional[str] = ..., rewards: _Optional[_Iterable[_Union[_reward_pb2.Reward, _Mapping]]] = ..., output: _Optional[bytes] = ..., output_content_type: _Optional[str] = ..., printed: _Optional[_Union[_attempt_pb2.PrintedTail, _Mapping]] = ...) -> None: ...

class CompletionAck(_message.Message):
    __slots__ = ("attempt", "status", "message")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    status: CompletionStatus
    message: str
    def __init__(self, attempt: _Optional[str] = ..., status: _Optional[_Union[CompletionStatus, str]] = ..., message: _Optional[str] = ...) -> None: ...

class RunnerInfo(_message.Message):
    __slots__ = ("host", "version", "labels", "slot_count", "address")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host: str
    version: str
    labels: _containers.ScalarMap[str, str]
    slot_count: int
    address: str
    def __init__(self, host: _Optional[str] = ..., version: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., slot_count: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class RunnerLoad(_message.Message):
    __slots__ = ("cpu_ratio", "memory_bytes", "memory_limit_bytes", "gpus", "slots")
    CPU_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    cpu_ratio: float
    memory_bytes: int
    memory_limit_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuLoad]
    slots: SlotLoad
    def __init__(self, cpu_ratio: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuLoad, _Mapping]]] = ..., slots: _Optional[_Union[SlotLoad, _Mapping]] = ...) -> None: ...

class SlotLoad(_message.Message):
    __slots__ = ("configured_count", "in_use_count", "limit_count", "automatic")
    CONFIGURED_COUNT_FIELD_NUMBER: _ClassVar[int]
    IN_USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    configured_count: int
    in_use_count: int
    limit_count: int
    automatic: bool
    def __init__(self, configured_count: _Optional[int] = ..., in_use_count: _Optional[int] = ..., limit_count: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class GpuLoad(_message.Message):
    __slots__ = ("model", "utilization_ratio", "memory_bytes", "memory_limit_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    utilization_ratio: float
    memory_bytes: int
    memory_limit_bytes: int
    def __init__(self, model: _Optional[str] = ..., utilization_ratio: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ...) -> None: ...

class RunnerOrder(_message.Message):
    __slots__ = ("number", "slots", "drain")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    number: int
    slots: SlotOrder
    drain: DrainOrder
    def __init__(self, number: _Optional[int] = ..., slots: _Optional[_Union[SlotOrder, _Mapping]] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ...) -> None: ...

class SlotOrder(_message.Message):
    __slots__ = ("slot_count", "automatic")
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    slot_count: int
    automatic: bool
    def __init__(self, slot_count: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
