from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("runner", "slot_count", "running", "completed_count", "draining", "slots", "straggler_count", "unacknowledged_count", "version", "isolation", "isolation_layers", "isolation_problem")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNACKNOWLEDGED_COUNT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    runner: str
    slot_count: int
    running: _containers.RepeatedCompositeFieldContainer[RunningAttempt]
    completed_count: int
    draining: bool
    slots: SlotStatus
    straggler_count: int
    unacknowledged_count: int
    version: str
    isolation: str
    isolation_layers: _containers.RepeatedScalarFieldContainer[str]
    isolation_problem: str
    def __init__(self, runner: _Optional[str] = ..., slot_count: _Optional[int] = ..., running: _Optional[_Iterable[_Union[RunningAttempt, _Mapping]]] = ..., completed_count: _Optional[int] = ..., draining: bool = ..., slots: _Optional[_Union[SlotStatus, _Mapping]] = ..., straggler_count: _Optional[int] = ..., unacknowledged_count: _Optional[int] = ..., version: _Optional[str] = ..., isolation: _Optional[str] = ..., isolation_layers: _Optional[_Iterable[str]] = ..., isolation_problem: _Optional[str] = ...) -> None: ...

class SlotStatus(_message.Message):
    __slots__ = ("automatic", "min_count", "max_count", "last_change")
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    automatic: bool
    min_count: int
    max_count: int
    last_change: SlotChange
    def __init__(self, automatic: bool = ..., min_count: _Optional[int] = ..., max_count: _Optional[int] = ..., last_change: _Optional[_Union[SlotChange, _Mapping]] = ...) -> None: ...

class SlotChange(_message.Message):
    __slots__ = ("time", "from_count", "to_count", "reason")
    TIME_FIELD_NUMBER: _ClassVar[int]
    FROM_COUNT_FIELD_NUMBER: _ClassVar[int]
    TO_COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    from_count: int
    to_count: int
    reason: str
    def __init__(self, time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., from_count: _Optional[int] = ..., to_count: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RunningAttempt(_message.Message):
    __slots__ = ("attempt", "start_time")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    start_time: _timestamp_pb2.Timestamp
    def __init__(self, attempt: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_count",)
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    running_count: int
    def __init__(self, running_count: _Optional[int] = ...) -> None: ...

class SetSlotsRequest(_message.Message):
    __slots__ = ("slot_count", "automatic")
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    slot_count: int
    automatic: bool
    def __init__(self, slot_count: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class SetSlotsResponse(_message.Message):
    __slots__ = ("slot_count", "automatic")
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    slot_count: int
    automatic: bool
    def __init__(self, slot_count: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class DumpStacksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DumpStacksResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
