from fulmen.store.v1 import attempt_pb2 as _attempt_pb2
from fulmen.store.v1 import failure_pb2 as _failure_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_STATE_UNSPECIFIED: _ClassVar[RolloutState]
    ROLLOUT_STATE_QUEUED: _ClassVar[RolloutState]
    ROLLOUT_STATE_RUNNING: _ClassVar[RolloutState]
    ROLLOUT_STATE_RETRY_WAIT: _ClassVar[RolloutState]
    ROLLOUT_STATE_SUCCEEDED: _ClassVar[RolloutState]
    ROLLOUT_STATE_FAILED: _ClassVar[RolloutState]
    ROLLOUT_STATE_CANCELLED: _ClassVar[RolloutState]

class RolloutMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_MODE_UNSPECIFIED: _ClassVar[RolloutMode]
    ROLLOUT_MODE_TRAIN: _ClassVar[RolloutMode]
    ROLLOUT_MODE_VALIDATION: _ClassVar[RolloutMode]
    ROLLOUT_MODE_TEST: _ClassVar[RolloutMode]
ROLLOUT_STATE_UNSPECIFIED: RolloutState
ROLLOUT_STATE_QUEUED: RolloutState
ROLLOUT_STATE_RUNNING: RolloutState
ROLLOUT_STATE_RETRY_WAIT: RolloutState
ROLLOUT_STATE_SUCCEEDED: RolloutState
ROLLOUT_STATE_FAILED: RolloutState
ROLLOUT_STATE_CANCELLED: RolloutState
ROLLOUT_MODE_UNSPECIFIED: RolloutMode
ROLLOUT_MODE_TRAIN: RolloutMode
ROLLOUT_MODE_VALIDATION: RolloutMode
ROLLOUT_MODE_TEST: RolloutMode

class Rollout(_message.Message):
    __slots__ = ("name", "project", "training_run", "group_id", "group_size", "mode", "input", "input_content_type", "agent", "resource_versions", "priority", "not_before_time", "required_labels", "policy", "metadata", "state", "failure_kind", "create_time", "end_time", "attempts", "task_type", "deadline_time", "ended_attempt_count", "reward", "duration", "prompt_token_count", "completion_token_count", "cost_micros", "failure_message", "retry_time", "input_start")
    class ResourceVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class RequiredLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_TIME_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_LABELS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_TIME_FIELD_NUMBER: _ClassVar[int]
    ENDED_ATTEMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COST_MICROS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_TIME_FIELD_NUMBER: _ClassVar[int]
    INPUT_START_FIELD_NUMBER: _ClassVar[int]
    name: str
    project: str
    training_run: str
    group_id: str
    group_size: int
    mode: RolloutMode
    input: bytes
    input_content_type: str
    agent: str
    resource_versions: _containers.ScalarMap[str, str]
    priority: int
    not_before_time: _timestamp_pb2.Timestamp
    required_labels: _containers.ScalarMap[str, str]
    policy: RolloutPolicy
    metadata: _containers.ScalarMap[str, str]
    state: RolloutState
    failure_kind: _failure_pb2.FailureKind
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    attempts: _containers.RepeatedCompositeFieldContainer[_attempt_pb2.Attempt]
    task_type: str
    deadline_time: _timestamp_pb2.Timestamp
    ended_attempt_count: int
    reward: float
    duration: _duration_pb2.Duration
    prompt_token_count: int
    completion_token_count: int
    cost_micros: int
    failure_message: str
    retry_time: _timestamp_pb2.Timestamp
    input_start: str
    def __init__(self, name: _Optional[str] = ..., project: _Optional[str] = ..., training_run: _Optional[str] = ..., group_id: _Optional[str] = ..., group_size: _Optional[int] = ..., mode: _Optional[_Union[RolloutMode, str]] = ..., input: _Optional[bytes] = ..., input_content_type: _Optional[str] = ..., agent: _Optional[str] = ..., resource_versions: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., not_before_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., required_labels: _Optional[_Mapping[str, str]] = ..., policy: _Optional[_Union[RolloutPolicy, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[RolloutState, str]] = ..., failure_kind: _Optional[_Union[_failure_pb2.FailureKind, str]] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[_attempt_pb2.Attempt, _Mapping]]] = ..., task_type: _Optional[str] = ..., deadline_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ended_attempt_count: _Optional[int] = ..., reward: _Optional[float] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., cost_micros: _Optional[int] = ..., failure_message: _Optional[str] = ..., retry_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., input_start: _Optional[str] = ...) -> None: ...

class RolloutPolicy(_message.Message):
    __slots__ = ("max_attempts", "attempt_timeout", "retry_on", "retry_backoff", "hedged", "model_token_budget", "attempt_timeout_quantile", "attempt_timeout_factor", "restart_lost")
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RETRY_ON_FIELD_NUMBER: _ClassVar[int]
    RETRY_BACKOFF_FIELD_NUMBER: _ClassVar[int]
    HEDGED_FIELD_NUMBER: _ClassVar[int]
    MODEL_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TIMEOUT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TIMEOUT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    RESTART_LOST_FIELD_NUMBER: _ClassVar[int]
    max_attempts: int
    attempt_timeout: _duration_pb2.Duration
    retry_on: _containers.RepeatedScalarFieldContainer[_failure_pb2.FailureKind]
    retry_backoff: _duration_pb2.Duration
    hedged: bool
    model_token_budget: int
    attempt_timeout_quantile: float
    attempt_timeout_factor: float
    restart_lost: bool
    def __init__(self, max_attempts: _Optional[int] = ..., attempt_timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., retry_on: _Optional[_Iterable[_Union[_failure_pb2.FailureKind, str]]] = ..., retry_backoff: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., hedged: bool = ..., model_token_budget: _Optional[int] = ..., attempt_timeout_quantile: _Optional[float] = ..., attempt_timeout_factor: _Optional[float] = ..., restart_lost: bool = ...) -> None: ...
