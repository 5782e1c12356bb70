from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OverlapPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERLAP_POLICY_UNSPECIFIED: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_ALLOW: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_SKIP: _ClassVar[OverlapPolicy]

class MissedPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISSED_POLICY_UNSPECIFIED: _ClassVar[MissedPolicy]
    MISSED_POLICY_LATEST: _ClassVar[MissedPolicy]
    MISSED_POLICY_SKIP: _ClassVar[MissedPolicy]

class ScheduleRunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_RUN_STATE_UNSPECIFIED: _ClassVar[ScheduleRunState]
    SCHEDULE_RUN_STATE_STARTING: _ClassVar[ScheduleRunState]
    SCHEDULE_RUN_STATE_CREATED: _ClassVar[ScheduleRunState]
    SCHEDULE_RUN_STATE_SKIPPED: _ClassVar[ScheduleRunState]
    SCHEDULE_RUN_STATE_MISSED: _ClassVar[ScheduleRunState]
    SCHEDULE_RUN_STATE_FAILED: _ClassVar[ScheduleRunState]
OVERLAP_POLICY_UNSPECIFIED: OverlapPolicy
OVERLAP_POLICY_ALLOW: OverlapPolicy
OVERLAP_POLICY_SKIP: OverlapPolicy
MISSED_POLICY_UNSPECIFIED: MissedPolicy
MISSED_POLICY_LATEST: MissedPolicy
MISSED_POLICY_SKIP: MissedPolicy
SCHEDULE_RUN_STATE_UNSPECIFIED: ScheduleRunState
SCHEDULE_RUN_STATE_STARTING: ScheduleRunState
SCHEDULE_RUN_STATE_CREATED: ScheduleRunState
SCHEDULE_RUN_STATE_SKIPPED: ScheduleRunState
SCHEDULE_RUN_STATE_MISSED: ScheduleRunState
SCHEDULE_RUN_STATE_FAILED: ScheduleRunState

class Schedule(_message.Message):
    __slots__ = ("name", "cron", "time_zone", "rollouts", "overlap_policy", "missed_policy", "create_time", "pause_time", "pause_reason", "next_run_time", "rollout_count", "last_run")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_POLICY_FIELD_NUMBER: _ClassVar[int]
    MISSED_POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_RUN_TIME_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_RUN_FIELD_NUMBER: _ClassVar[int]
    name: str
    cron: str
    time_zone: str
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    overlap_policy: OverlapPolicy
    missed_policy: MissedPolicy
    create_time: _timestamp_pb2.Timestamp
    pause_time: _timestamp_pb2.Timestamp
    pause_reason: str
    next_run_time: _timestamp_pb2.Timestamp
    rollout_count: int
    last_run: ScheduleRun
    def __init__(self, name: _Optional[str] = ..., cron: _Optional[str] = ..., time_zone: _Optional[str] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., overlap_policy: _Optional[_Union[OverlapPolicy, str]] = ..., missed_policy: _Optional[_Union[MissedPolicy, str]] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., pause_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., pause_reason: _Optional[str] = ..., next_run_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., rollout_count: _Optional[int] = ..., last_run: _Optional[_Union[ScheduleRun, _Mapping]] = ...) -> None: ...

class ScheduleRun(_message.Message):
    __slots__ = ("due_time", "create_time", "state", "rollouts", "failure_reason", "failure_message")
    DUE_TIME_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    due_time: _timestamp_pb2.Timestamp
    create_time: _timestamp_pb2.Timestamp
    state: ScheduleRunState
    rollouts: _containers.RepeatedScalarFieldContainer[str]
    failure_reason: str
    failure_message: str
    def __init__(self, due_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., state: _Optional[_Union[ScheduleRunState, str]] = ..., rollouts: _Optional[_Iterable[str]] = ..., failure_reason: _Optional[str] = ..., failure_message: _Optional[str] = ...) -> None: ...

class CreateScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: Schedule
    def __init__(self, schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class CreateScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: Schedule
    def __init__(self, schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class GetScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetScheduleResponse(_message.Message):
    __slots__ = ("schedule", "runs", "next_run_times")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_RUN_TIMES_FIELD_NUMBER: _ClassVar[int]
    schedule: Schedule
    runs: _containers.RepeatedCompositeFieldContainer[ScheduleRun]
    next_run_times: _containers.RepeatedCompositeFieldContainer[_timestamp_pb2.Timestamp]
    def __init__(self, schedule: _Optional[_Union[Schedule, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[ScheduleRun, _Mapping]]] = ..., next_run_times: _Optional[_Iterable[_Union[_timestamp_pb2.Timestamp, _Mapping]]] = ...) -> None: ...

class ListSchedulesRequest(_message.Message):
    __slots__ = ("project",)
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    project: str
    def __init__(self, project: _Optional[str] = ...) -> None: ...

class ListSchedulesResponse(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[Schedule]
    def __init__(self, schedules: _Optional[_Iterable[_Union[Schedule, _Mapping]]] = ...) -> None: ...

class PauseScheduleRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PauseScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: Schedule
    def __init__(self, schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class ResumeScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeScheduleResponse(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: Schedule
    def __init__(self, schedule: _Optional[_Union[Schedule, _Mapping]] = ...) -> None: ...

class DeleteScheduleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteScheduleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
