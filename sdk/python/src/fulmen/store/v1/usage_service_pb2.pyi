from fulmen.store.v1 import model_limits_pb2 as _model_limits_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UsageGrouping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    USAGE_GROUPING_UNSPECIFIED: _ClassVar[UsageGrouping]
    USAGE_GROUPING_MODEL: _ClassVar[UsageGrouping]
    USAGE_GROUPING_BACKEND: _ClassVar[UsageGrouping]
    USAGE_GROUPING_TRAINING_RUN: _ClassVar[UsageGrouping]
    USAGE_GROUPING_ROLLOUT: _ClassVar[UsageGrouping]
    USAGE_GROUPING_ATTEMPT: _ClassVar[UsageGrouping]
    USAGE_GROUPING_AGENT: _ClassVar[UsageGrouping]
    USAGE_GROUPING_PROJECT: _ClassVar[UsageGrouping]

class UsagePeriod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    USAGE_PERIOD_UNSPECIFIED: _ClassVar[UsagePeriod]
    USAGE_PERIOD_HOUR: _ClassVar[UsagePeriod]
    USAGE_PERIOD_DAY: _ClassVar[UsagePeriod]
USAGE_GROUPING_UNSPECIFIED: UsageGrouping
USAGE_GROUPING_MODEL: UsageGrouping
USAGE_GROUPING_BACKEND: UsageGrouping
USAGE_GROUPING_TRAINING_RUN: UsageGrouping
USAGE_GROUPING_ROLLOUT: UsageGrouping
USAGE_GROUPING_ATTEMPT: UsageGrouping
USAGE_GROUPING_AGENT: UsageGrouping
USAGE_GROUPING_PROJECT: UsageGrouping
USAGE_PERIOD_UNSPECIFIED: UsagePeriod
USAGE_PERIOD_HOUR: UsagePeriod
USAGE_PERIOD_DAY: UsagePeriod

class Usage(_message.Message):
    __slots__ = ("request_count", "failure_count", "prompt_token_count", "cached_token_count", "completion_token_count", "cost_micros")
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COST_MICROS_FIELD_NUMBER: _ClassVar[int]
    request_count: int
    failure_count: int
    prompt_token_count: int
    cached_token_count: int
    completion_token_count: int
    cost_micros: int
    def __init__(self, request_count: _Optional[int] = ..., failure_count: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., cost_micros: _Optional[int] = ...) -> None: ...

class UsageDelta(_message.Message):
    __slots__ = ("project", "attempt", "model", "backend", "usage")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    project: str
    attempt: str
    model: str
    backend: str
    usage: Usage
    def __init__(self, project: _Optional[str] = ..., attempt: _Optional[str] = ..., model: _Optional[str] = ..., backend: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class SpendDelta(_message.Message):
    __slots__ = ("project", "subject", "period", "cost_micros")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    COST_MICROS_FIELD_NUMBER: _ClassVar[int]
    project: str
    subject: str
    period: _model_limits_pb2.BudgetPeriod
    cost_micros: int
    def __init__(self, project: _Optional[str] = ..., subject: _Optional[str] = ..., period: _Optional[_Union[_model_limits_pb2.BudgetPeriod, str]] = ..., cost_micros: _Optional[int] = ...) -> None: ...

class LimitWindow(_message.Message):
    __slots__ = ("project", "backend", "attempt", "request_counts", "token_counts", "in_flight_count", "reserved_token_count")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    project: str
    backend: str
    attempt: str
    request_counts: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    in_flight_count: int
    reserved_token_count: int
    def __init__(self, project: _Optional[str] = ..., backend: _Optional[str] = ..., attempt: _Optional[str] = ..., request_counts: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., in_flight_count: _Optional[int] = ..., reserved_token_count: _Optional[int] = ...) -> None: ...

class SyncUsageRequest(_message.Message):
    __slots__ = ("instance_id", "sequence", "usage", "windows", "slot", "spend")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SPEND_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    sequence: int
    usage: _containers.RepeatedCompositeFieldContainer[UsageDelta]
    windows: _containers.RepeatedCompositeFieldContainer[LimitWindow]
    slot: int
    spend: _containers.RepeatedCompositeFieldContainer[SpendDelta]
    def __init__(self, instance_id: _Optional[str] = ..., sequence: _Optional[int] = ..., usage: _Optional[_Iterable[_Union[UsageDelta, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[LimitWindow, _Mapping]]] = ..., slot: _Optional[int] = ..., spend: _Optional[_Iterable[_Union[SpendDelta, _Mapping]]] = ...) -> None: ...

class SyncUsageResponse(_message.Message):
    __slots__ = ("store_time", "limits", "others", "attempts", "rejected_count")
    STORE_TIME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    store_time: _timestamp_pb2.Timestamp
    limits: _containers.RepeatedCompositeFieldContainer[ProjectModelLimits]
    others: _containers.RepeatedCompositeFieldContainer[LimitWindow]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptTokens]
    rejected_count: int
    def __init__(self, store_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., limits: _Optional[_Iterable[_Union[ProjectModelLimits, _Mapping]]] = ..., others: _Optional[_Iterable[_Union[LimitWindow, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[AttemptTokens, _Mapping]]] = ..., rejected_count: _Optional[int] = ...) -> None: ...

class ProjectModelLimits(_message.Message):
    __slots__ = ("project", "limits")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    project: str
    limits: _model_limits_pb2.ModelLimits
    def __init__(self, project: _Optional[str] = ..., limits: _Optional[_Union[_model_limits_pb2.ModelLimits, _Mapping]] = ...) -> None: ...

class AttemptTokens(_message.Message):
    __slots__ = ("attempt", "token_count")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    token_count: int
    def __init__(self, attempt: _Optional[str] = ..., token_count: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("project", "training_run", "rollout", "start_time", "end_time", "group_by", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    rollout: str
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    group_by: UsageGrouping
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., rollout: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., group_by: _Optional[_Union[UsageGrouping, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("groups", "next_page_token")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[UsageGroup]
    next_page_token: str
    def __init__(self, groups: _Optional[_Iterable[_Union[UsageGroup, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UsageGroup(_message.Message):
    __slots__ = ("name", "usage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    usage: Usage
    def __init__(self, name: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class GetUsageSeriesRequest(_message.Message):
    __slots__ = ("project", "training_run", "start_time", "end_time", "period", "group_by", "max_series")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    MAX_SERIES_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    period: UsagePeriod
    group_by: UsageGrouping
    max_series: int
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., period: _Optional[_Union[UsagePeriod, str]] = ..., group_by: _Optional[_Union[UsageGrouping, str]] = ..., max_series: _Optional[int] = ...) -> None: ...

class GetUsageSeriesResponse(_message.Message):
    __slots__ = ("start_time", "end_time", "series", "others", "other_count")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    OTHER_COUNT_FIELD_NUMBER: _ClassVar[int]
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    series: _containers.RepeatedCompositeFieldContainer[UsageSeries]
    others: UsageSeries
    other_count: int
    def __init__(self, start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., series: _Optional[_Iterable[_Union[UsageSeries, _Mapping]]] = ..., others: _Optional[_Union[UsageSeries, _Mapping]] = ..., other_count: _Optional[int] = ...) -> None: ...

class UsageSeries(_message.Message):
    __slots__ = ("name", "total", "points")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    total: Usage
    points: _containers.RepeatedCompositeFieldContainer[UsagePoint]
    def __init__(self, name: _Optional[str] = ..., total: _Optional[_Union[Usage, _Mapping]] = ..., points: _Optional[_Iterable[_Union[UsagePoint, _Mapping]]] = ...) -> None: ...

class UsagePoint(_message.Message):
    __slots__ = ("start_time", "usage")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    start_time: _timestamp_pb2.Timestamp
    usage: Usage
    def __init__(self, start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...
