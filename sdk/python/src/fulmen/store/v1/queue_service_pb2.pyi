from fulmen.store.v1 import rollout_service_pb2 as _rollout_service_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListQueuesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues", "next_page_token")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    next_page_token: str
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("project", "queued_count", "running_count", "weight", "max_running", "max_queued", "pause_time", "pause_reason")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_REASON_FIELD_NUMBER: _ClassVar[int]
    project: str
    queued_count: int
    running_count: int
    weight: int
    max_running: int
    max_queued: int
    pause_time: _timestamp_pb2.Timestamp
    pause_reason: str
    def __init__(self, project: _Optional[str] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., weight: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., pause_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., pause_reason: _Optional[str] = ...) -> None: ...

class WatchQueueStatsRequest(_message.Message):
    __slots__ = ("project", "training_run")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ...) -> None: ...

class WatchQueueStatsResponse(_message.Message):
    __slots__ = ("stats", "backlog")
    STATS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    stats: _rollout_service_pb2.GetQueueStatsResponse
    backlog: _containers.RepeatedCompositeFieldContainer[LabelBacklog]
    def __init__(self, stats: _Optional[_Union[_rollout_service_pb2.GetQueueStatsResponse, _Mapping]] = ..., backlog: _Optional[_Iterable[_Union[LabelBacklog, _Mapping]]] = ...) -> None: ...

class LabelBacklog(_message.Message):
    __slots__ = ("labels", "queued_count", "running_count")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    queued_count: int
    running_count: int
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ...) -> None: ...
