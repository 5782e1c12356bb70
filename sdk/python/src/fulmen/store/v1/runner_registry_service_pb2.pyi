from fulmen.store.v1 import lease_pb2 as _lease_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Runner(_message.Message):
    __slots__ = ("name", "info", "running_count", "create_time", "lease_expire_time", "attempts", "load", "ended_count", "failed_count", "project", "order", "order_pending", "load_history")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ORDER_PENDING_FIELD_NUMBER: _ClassVar[int]
    LOAD_HISTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    info: _lease_pb2.RunnerInfo
    running_count: int
    create_time: _timestamp_pb2.Timestamp
    lease_expire_time: _timestamp_pb2.Timestamp
    attempts: _containers.RepeatedScalarFieldContainer[str]
    load: _lease_pb2.RunnerLoad
    ended_count: int
    failed_count: int
    project: str
    order: _lease_pb2.RunnerOrder
    order_pending: bool
    load_history: _containers.RepeatedCompositeFieldContainer[RunnerLoadSample]
    def __init__(self, name: _Optional[str] = ..., info: _Optional[_Union[_lease_pb2.RunnerInfo, _Mapping]] = ..., running_count: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., lease_expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[_Iterable[str]] = ..., load: _Optional[_Union[_lease_pb2.RunnerLoad, _Mapping]] = ..., ended_count: _Optional[int] = ..., failed_count: _Optional[int] = ..., project: _Optional[str] = ..., order: _Optional[_Union[_lease_pb2.RunnerOrder, _Mapping]] = ..., order_pending: bool = ..., load_history: _Optional[_Iterable[_Union[RunnerLoadSample, _Mapping]]] = ...) -> None: ...

class RunnerLoadSample(_message.Message):
    __slots__ = ("minute_time", "load")
    MINUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    minute_time: _timestamp_pb2.Timestamp
    load: _lease_pb2.RunnerLoad
    def __init__(self, minute_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., load: _Optional[_Union[_lease_pb2.RunnerLoad, _Mapping]] = ...) -> None: ...

class ListRunnersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "with_load_history")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_LOAD_HISTORY_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    with_load_history: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., with_load_history: bool = ...) -> None: ...

class ListRunnersResponse(_message.Message):
    __slots__ = ("runners", "next_page_token")
    RUNNERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    runners: _containers.RepeatedCompositeFieldContainer[Runner]
    next_page_token: str
    def __init__(self, runners: _Optional[_Iterable[_Union[Runner, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetRunnerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRunnerResponse(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: Runner
    def __init__(self, runner: _Optional[_Union[Runner, _Mapping]] = ...) -> None: ...

class WatchRunnersRequest(_message.Message):
    __slots__ = ("labels",)
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WatchRunnersResponse(_message.Message):
    __slots__ = ("runners", "removed", "snapshot_complete")
    RUNNERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    runners: _containers.RepeatedCompositeFieldContainer[Runner]
    removed: _containers.RepeatedScalarFieldContainer[str]
    snapshot_complete: bool
    def __init__(self, runners: _Optional[_Iterable[_Union[Runner, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., snapshot_complete: bool = ...) -> None: ...

class GetFleetDemandRequest(_message.Message):
    __slots__ = ("project", "labels", "target_drain", "slots_per_runner", "default_duration", "min_runners", "max_runners", "forecast_horizon")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TARGET_DRAIN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_RUNNER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DURATION_FIELD_NUMBER: _ClassVar[int]
    MIN_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_HORIZON_FIELD_NUMBER: _ClassVar[int]
    project: str
    labels: _containers.ScalarMap[str, str]
    target_drain: _duration_pb2.Duration
    slots_per_runner: int
    default_duration: _duration_pb2.Duration
    min_runners: int
    max_runners: int
    forecast_horizon: _duration_pb2.Duration
    def __init__(self, project: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., target_drain: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., slots_per_runner: _Optional[int] = ..., default_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., min_runners: _Optional[int] = ..., max_runners: _Optional[int] = ..., forecast_horizon: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetFleetDemandResponse(_message.Message):
    __slots__ = ("desired_runner_count", "desired_slot_count", "queued_count", "running_count", "predicted_work", "age", "forecast_slot_count", "forecast_error", "naive_forecast_error")
    DESIRED_RUNNER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DESIRED_SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WORK_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    FORECAST_SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FORECAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    NAIVE_FORECAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    desired_runner_count: int
    desired_slot_count: int
    queued_count: int
    running_count: int
    predicted_work: _duration_pb2.Duration
    age: _duration_pb2.Duration
    forecast_slot_count: int
    forecast_error: float
    naive_forecast_error: float
    def __init__(self, desired_runner_count: _Optional[int] = ..., desired_slot_count: _Optional[int] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., predicted_work: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., forecast_slot_count: _Optional[int] = ..., forecast_error: _Optional[float] = ..., naive_forecast_error: _Optional[float] = ...) -> None: ...

class SetRunnerSlotsRequest(_message.Message):
    __slots__ = ("name", "slot_count", "automatic")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    slot_count: int
    automatic: bool
    def __init__(self, name: _Optional[str] = ..., slot_count: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class SetRunnerSlotsResponse(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: Runner
    def __init__(self, runner: _Optional[_Union[Runner, _Mapping]] = ...) -> None: ...

class DrainRunnerRequest(_message.Message):
    __slots__ = ("name", "grace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainRunnerResponse(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: Runner
    def __init__(self, runner: _Optional[_Union[Runner, _Mapping]] = ...) -> None: ...
