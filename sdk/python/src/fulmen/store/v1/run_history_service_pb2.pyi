from fulmen.store.v1 import run_lease_service_pb2 as _run_lease_service_pb2
from fulmen.type.v1 import reward_distribution_pb2 as _reward_distribution_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunAxis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_AXIS_UNSPECIFIED: _ClassVar[RunAxis]
    RUN_AXIS_STEP: _ClassVar[RunAxis]
    RUN_AXIS_TIME: _ClassVar[RunAxis]
    RUN_AXIS_TOKENS: _ClassVar[RunAxis]
RUN_AXIS_UNSPECIFIED: RunAxis
RUN_AXIS_STEP: RunAxis
RUN_AXIS_TIME: RunAxis
RUN_AXIS_TOKENS: RunAxis

class AppendRunHistoryRequest(_message.Message):
    __slots__ = ("run_fence", "events")
    RUN_FENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    run_fence: _run_lease_service_pb2.RunFence
    events: _containers.RepeatedCompositeFieldContainer[RunHistoryEvent]
    def __init__(self, run_fence: _Optional[_Union[_run_lease_service_pb2.RunFence, _Mapping]] = ..., events: _Optional[_Iterable[_Union[RunHistoryEvent, _Mapping]]] = ...) -> None: ...

class RunHistoryEvent(_message.Message):
    __slots__ = ("sequence", "event_time", "step", "notice", "rolled_back_to_step")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_TO_STEP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    event_time: _timestamp_pb2.Timestamp
    step: RunHistoryStep
    notice: RunHistoryNotice
    rolled_back_to_step: int
    def __init__(self, sequence: _Optional[int] = ..., event_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., step: _Optional[_Union[RunHistoryStep, _Mapping]] = ..., notice: _Optional[_Union[RunHistoryNotice, _Mapping]] = ..., rolled_back_to_step: _Optional[int] = ...) -> None: ...

class RunHistoryStep(_message.Message):
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

class RunHistoryNotice(_message.Message):
    __slots__ = ("severity", "message")
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    severity: str
    message: str
    def __init__(self, severity: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class AppendRunHistoryResponse(_message.Message):
    __slots__ = ("last_sequence",)
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    last_sequence: int
    def __init__(self, last_sequence: _Optional[int] = ...) -> None: ...

class GetRunMetricsRequest(_message.Message):
    __slots__ = ("training_runs", "metrics", "axis", "max_points")
    TRAINING_RUNS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    MAX_POINTS_FIELD_NUMBER: _ClassVar[int]
    training_runs: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.RepeatedScalarFieldContainer[str]
    axis: RunAxis
    max_points: int
    def __init__(self, training_runs: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Iterable[str]] = ..., axis: _Optional[_Union[RunAxis, str]] = ..., max_points: _Optional[int] = ...) -> None: ...

class GetRunMetricsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunMetrics]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunMetrics, _Mapping]]] = ...) -> None: ...

class RunMetrics(_message.Message):
    __slots__ = ("training_run", "curves", "metric_names", "last_sequence", "first_event_time")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    METRIC_NAMES_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    curves: _containers.RepeatedCompositeFieldContainer[RunCurve]
    metric_names: _containers.RepeatedScalarFieldContainer[str]
    last_sequence: int
    first_event_time: _timestamp_pb2.Timestamp
    def __init__(self, training_run: _Optional[str] = ..., curves: _Optional[_Iterable[_Union[RunCurve, _Mapping]]] = ..., metric_names: _Optional[_Iterable[str]] = ..., last_sequence: _Optional[int] = ..., first_event_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RunCurve(_message.Message):
    __slots__ = ("metric", "positions", "values", "measurement_count", "not_finite_count")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_COUNT_FIELD_NUMBER: _ClassVar[int]
    metric: str
    positions: _containers.RepeatedScalarFieldContainer[float]
    values: _containers.RepeatedScalarFieldContainer[float]
    measurement_count: int
    not_finite_count: int
    def __init__(self, metric: _Optional[str] = ..., positions: _Optional[_Iterable[float]] = ..., values: _Optional[_Iterable[float]] = ..., measurement_count: _Optional[int] = ..., not_finite_count: _Optional[int] = ...) -> None: ...

class ListRewardDistributionsRequest(_message.Message):
    __slots__ = ("training_run", "max_steps")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    max_steps: int
    def __init__(self, training_run: _Optional[str] = ..., max_steps: _Optional[int] = ...) -> None: ...

class ListRewardDistributionsResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepRewards]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepRewards, _Mapping]]] = ...) -> None: ...

class StepRewards(_message.Message):
    __slots__ = ("step", "rewards")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rewards: _reward_distribution_pb2.RewardDistribution
    def __init__(self, step: _Optional[int] = ..., rewards: _Optional[_Union[_reward_distribution_pb2.RewardDistribution, _Mapping]] = ...) -> None: ...

class ListRunNoticesRequest(_message.Message):
    __slots__ = ("training_run", "page_size", "page_token")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    page_size: int
    page_token: str
    def __init__(self, training_run: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRunNoticesResponse(_message.Message):
    __slots__ = ("notices", "next_page_token")
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    notices: _containers.RepeatedCompositeFieldContainer[RecordedNotice]
    next_page_token: str
    def __init__(self, notices: _Optional[_Iterable[_Union[RecordedNotice, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RecordedNotice(_message.Message):
    __slots__ = ("sequence", "event_time", "step", "severity", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    event_time: _timestamp_pb2.Timestamp
    step: int
    severity: str
    message: str
    def __init__(self, sequence: _Optional[int] = ..., event_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., step: _Optional[int] = ..., severity: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
