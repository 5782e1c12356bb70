from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchCreateRolloutsRequest(_message.Message):
    __slots__ = ("rollouts", "request_id")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    request_id: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class BatchCreateRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRolloutResponse(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("project", "training_run", "states", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    states: _containers.RepeatedScalarFieldContainer[_rollout_pb2.RolloutState]
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_rollout_pb2.RolloutState, str]]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts", "next_page_token")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    next_page_token: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelRolloutsRequest(_message.Message):
    __slots__ = ("names", "training_run", "project")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    training_run: str
    project: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., training_run: _Optional[str] = ..., project: _Optional[str] = ...) -> None: ...

class CancelRolloutsResponse(_message.Message):
    __slots__ = ("cancelled_count", "cancelling_count")
    CANCELLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CANCELLING_COUNT_FIELD_NUMBER: _ClassVar[int]
    cancelled_count: int
    cancelling_count: int
    def __init__(self, cancelled_count: _Optional[int] = ..., cancelling_count: _Optional[int] = ...) -> None: ...

class RetryRolloutsRequest(_message.Message):
    __slots__ = ("names", "request_id")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RetryRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class WatchRolloutsRequest(_message.Message):
    __slots__ = ("project", "training_run", "cursor")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    cursor: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., cursor: _Optional[str] = ...) -> None: ...

class WatchRolloutsResponse(_message.Message):
    __slots__ = ("groups", "cursor")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[FinishedGroup]
    cursor: str
    def __init__(self, groups: _Optional[_Iterable[_Union[FinishedGroup, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class FinishedGroup(_message.Message):
    __slots__ = ("group_id", "rollouts", "cursor")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    cursor: str
    def __init__(self, group_id: _Optional[str] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetQueueStatsRequest(_message.Message):
    __slots__ = ("project", "training_run")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ...) -> None: ...

class GetQueueStatsResponse(_message.Message):
    __slots__ = ("queued_count", "running_count", "delayed_count", "oldest_queued_age", "runner_count", "open_credit_count")
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELAYED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_QUEUED_AGE_FIELD_NUMBER: _ClassVar[int]
    RUNNER_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    queued_count: int
    running_count: int
    delayed_count: int
    oldest_queued_age: _duration_pb2.Duration
    runner_count: int
    open_credit_count: int
    def __init__(self, queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., delayed_count: _Optional[int] = ..., oldest_queued_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., runner_count: _Optional[int] = ..., open_credit_count: _Optional[int] = ...) -> None: ...
