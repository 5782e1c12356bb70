from fulmen.type.v1 import reward_distribution_pb2 as _reward_distribution_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainingRunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINING_RUN_STATE_UNSPECIFIED: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_PENDING: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_RUNNING: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_PAUSED: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_SUCCEEDED: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_FAILED: _ClassVar[TrainingRunState]
    TRAINING_RUN_STATE_CANCELLED: _ClassVar[TrainingRunState]
TRAINING_RUN_STATE_UNSPECIFIED: TrainingRunState
TRAINING_RUN_STATE_PENDING: TrainingRunState
TRAINING_RUN_STATE_RUNNING: TrainingRunState
TRAINING_RUN_STATE_PAUSED: TrainingRunState
TRAINING_RUN_STATE_SUCCEEDED: TrainingRunState
TRAINING_RUN_STATE_FAILED: TrainingRunState
TRAINING_RUN_STATE_CANCELLED: TrainingRunState

class TrainingRun(_message.Message):
    __slots__ = ("name", "project", "display_name", "algorithm", "settings_json", "policy", "inputs", "state", "failure_message", "step", "step_count", "policy_version", "model_path", "results", "create_time", "start_time", "end_time", "provenance", "rollback_count", "owner_address", "waiting_reason", "stages", "prompt_version", "engine_count", "ready_engine_count", "tags", "pause_at_step")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ProvenanceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_COUNT_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_COUNT_FIELD_NUMBER: _ClassVar[int]
    READY_ENGINE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_AT_STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    project: str
    display_name: str
    algorithm: str
    settings_json: str
    policy: PolicySpec
    inputs: _containers.ScalarMap[str, str]
    state: TrainingRunState
    failure_message: str
    step: int
    step_count: int
    policy_version: str
    model_path: str
    results: _containers.ScalarMap[str, float]
    create_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    provenance: _containers.ScalarMap[str, str]
    rollback_count: int
    owner_address: str
    waiting_reason: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    prompt_version: str
    engine_count: int
    ready_engine_count: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    pause_at_step: int
    def __init__(self, name: _Optional[str] = ..., project: _Optional[str] = ..., display_name: _Optional[str] = ..., algorithm: _Optional[str] = ..., settings_json: _Optional[str] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., inputs: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[TrainingRunState, str]] = ..., failure_message: _Optional[str] = ..., step: _Optional[int] = ..., step_count: _Optional[int] = ..., policy_version: _Optional[str] = ..., model_path: _Optional[str] = ..., results: _Optional[_Mapping[str, float]] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., provenance: _Optional[_Mapping[str, str]] = ..., rollback_count: _Optional[int] = ..., owner_address: _Optional[str] = ..., waiting_reason: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., prompt_version: _Optional[str] = ..., engine_count: _Optional[int] = ..., ready_engine_count: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., pause_at_step: _Optional[int] = ...) -> None: ...

class PolicySpec(_message.Message):
    __slots__ = ("name", "version", "path", "build", "base")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    path: str
    build: str
    base: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., path: _Optional[str] = ..., build: _Optional[str] = ..., base: _Optional[str] = ...) -> None: ...

class TrainingRunEvent(_message.Message):
    __slots__ = ("sequence", "event_time", "run", "step", "notice")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    event_time: _timestamp_pb2.Timestamp
    run: TrainingRun
    step: StepMetrics
    notice: RunNotice
    def __init__(self, sequence: _Optional[int] = ..., event_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., run: _Optional[_Union[TrainingRun, _Mapping]] = ..., step: _Optional[_Union[StepMetrics, _Mapping]] = ..., notice: _Optional[_Union[RunNotice, _Mapping]] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "values", "rewards")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    values: _containers.ScalarMap[str, float]
    rewards: _reward_distribution_pb2.RewardDistribution
    def __init__(self, step: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., rewards: _Optional[_Union[_reward_distribution_pb2.RewardDistribution, _Mapping]] = ...) -> None: ...

class RunNotice(_message.Message):
    __slots__ = ("severity", "message")
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    severity: str
    message: str
    def __init__(self, severity: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "step", "policy_version", "size_bytes", "create_time", "sequence", "reward_mean")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    policy_version: str
    size_bytes: int
    create_time: _timestamp_pb2.Timestamp
    sequence: int
    reward_mean: float
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[str] = ..., size_bytes: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., sequence: _Optional[int] = ..., reward_mean: _Optional[float] = ...) -> None: ...
