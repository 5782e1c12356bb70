from fulmen.store.v1 import attempt_pb2 as _attempt_pb2
from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from fulmen.store.v1 import rollout_changes_pb2 as _rollout_changes_pb2
from fulmen.store.v1 import rollout_comparison_pb2 as _rollout_comparison_pb2
from fulmen.store.v1 import rollout_selection_pb2 as _rollout_selection_pb2
from fulmen.store.v1 import run_lease_service_pb2 as _run_lease_service_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchCreateRolloutsRequest(_message.Message):
    __slots__ = ("rollouts", "request_id", "run_fence")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FENCE_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    request_id: str
    run_fence: _run_lease_service_pb2.RunFence
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., request_id: _Optional[str] = ..., run_fence: _Optional[_Union[_run_lease_service_pb2.RunFence, _Mapping]] = ...) -> None: ...

class BatchCreateRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class StreamCreateRolloutsRequest(_message.Message):
    __slots__ = ("rollouts", "request_id")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    request_id: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class StreamCreateRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("name", "with_printed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WITH_PRINTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    with_printed: bool
    def __init__(self, name: _Optional[str] = ..., with_printed: bool = ...) -> None: ...

class GetRolloutResponse(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class ListAttemptsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAttemptsResponse(_message.Message):
    __slots__ = ("attempts", "next_page_token")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[_attempt_pb2.Attempt]
    next_page_token: str
    def __init__(self, attempts: _Optional[_Iterable[_Union[_attempt_pb2.Attempt, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("project", "training_run", "states", "page_size", "page_token", "filter", "order_by", "time_limit")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    states: _containers.RepeatedScalarFieldContainer[_rollout_pb2.RolloutState]
    page_size: int
    page_token: str
    filter: str
    order_by: str
    time_limit: _duration_pb2.Duration
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_rollout_pb2.RolloutState, str]]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ..., order_by: _Optional[str] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts", "next_page_token", "looked_back_to_time")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOOKED_BACK_TO_TIME_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    next_page_token: str
    looked_back_to_time: _timestamp_pb2.Timestamp
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., looked_back_to_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CancelRolloutsRequest(_message.Message):
    __slots__ = ("names", "training_run", "project", "run_fence")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    RUN_FENCE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    training_run: str
    project: str
    run_fence: _run_lease_service_pb2.RunFence
    def __init__(self, names: _Optional[_Iterable[str]] = ..., training_run: _Optional[str] = ..., project: _Optional[str] = ..., run_fence: _Optional[_Union[_run_lease_service_pb2.RunFence, _Mapping]] = ...) -> None: ...

class CancelRolloutsResponse(_message.Message):
    __slots__ = ("cancelled_count", "cancelling_count")
    CANCELLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CANCELLING_COUNT_FIELD_NUMBER: _ClassVar[int]
    cancelled_count: int
    cancelling_count: int
    def __init__(self, cancelled_count: _Optional[int] = ..., cancelling_count: _Optional[int] = ...) -> None: ...

class RetryRolloutsRequest(_message.Message):
    __slots__ = ("names", "request_id", "filter", "project", "training_run")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    filter: str
    project: str
    training_run: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., filter: _Optional[str] = ..., project: _Optional[str] = ..., training_run: _Optional[str] = ...) -> None: ...

class RetryRolloutsResponse(_message.Message):
    __slots__ = ("rollouts", "has_more")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    has_more: bool
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., has_more: bool = ...) -> None: ...

class WatchRolloutsRequest(_message.Message):
    __slots__ = ("project", "training_run", "cursor", "group_id")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    cursor: str
    group_id: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., cursor: _Optional[str] = ..., group_id: _Optional[str] = ...) -> None: ...

class WatchRolloutsResponse(_message.Message):
    __slots__ = ("groups", "cursor")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[FinishedGroup]
    cursor: str
    def __init__(self, groups: _Optional[_Iterable[_Union[FinishedGroup, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class FinishedGroup(_message.Message):
    __slots__ = ("group_id", "rollouts", "cursor", "group_size")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    cursor: str
    group_size: int
    def __init__(self, group_id: _Optional[str] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., cursor: _Optional[str] = ..., group_size: _Optional[int] = ...) -> None: ...

class GetQueueStatsRequest(_message.Message):
    __slots__ = ("project", "training_run")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ...) -> None: ...

class GetQueueStatsResponse(_message.Message):
    __slots__ = ("queued_count", "running_count", "delayed_count", "oldest_queued_age", "runner_count", "open_credit_count", "priorities", "rules", "weight", "max_running", "max_queued", "task_types", "unmatched", "paused_agents", "pause_time", "pause_reason")
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELAYED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_QUEUED_AGE_FIELD_NUMBER: _ClassVar[int]
    RUNNER_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPES_FIELD_NUMBER: _ClassVar[int]
    UNMATCHED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_AGENTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_REASON_FIELD_NUMBER: _ClassVar[int]
    queued_count: int
    running_count: int
    delayed_count: int
    oldest_queued_age: _duration_pb2.Duration
    runner_count: int
    open_credit_count: int
    priorities: _containers.RepeatedCompositeFieldContainer[PriorityStats]
    rules: QueueRules
    weight: int
    max_running: int
    max_queued: int
    task_types: _containers.RepeatedCompositeFieldContainer[TaskTypeStats]
    unmatched: _containers.RepeatedCompositeFieldContainer[UnmatchedLabels]
    paused_agents: _containers.RepeatedCompositeFieldContainer[PausedAgent]
    pause_time: _timestamp_pb2.Timestamp
    pause_reason: str
    def __init__(self, queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., delayed_count: _Optional[int] = ..., oldest_queued_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., runner_count: _Optional[int] = ..., open_credit_count: _Optional[int] = ..., priorities: _Optional[_Iterable[_Union[PriorityStats, _Mapping]]] = ..., rules: _Optional[_Union[QueueRules, _Mapping]] = ..., weight: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., task_types: _Optional[_Iterable[_Union[TaskTypeStats, _Mapping]]] = ..., unmatched: _Optional[_Iterable[_Union[UnmatchedLabels, _Mapping]]] = ..., paused_agents: _Optional[_Iterable[_Union[PausedAgent, _Mapping]]] = ..., pause_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., pause_reason: _Optional[str] = ...) -> None: ...

class PauseQueueRequest(_message.Message):
    __slots__ = ("project", "reason")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    project: str
    reason: str
    def __init__(self, project: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PauseQueueResponse(_message.Message):
    __slots__ = ("pause_time",)
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    pause_time: _timestamp_pb2.Timestamp
    def __init__(self, pause_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ResumeQueueRequest(_message.Message):
    __slots__ = ("project",)
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    project: str
    def __init__(self, project: _Optional[str] = ...) -> None: ...

class ResumeQueueResponse(_message.Message):
    __slots__ = ("was_paused",)
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    was_paused: bool
    def __init__(self, was_paused: bool = ...) -> None: ...

class PausedAgent(_message.Message):
    __slots__ = ("agent", "pause_time", "rollouts")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    pause_time: _timestamp_pb2.Timestamp
    rollouts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent: _Optional[str] = ..., pause_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., rollouts: _Optional[_Iterable[str]] = ...) -> None: ...

class PriorityStats(_message.Message):
    __slots__ = ("priority", "queued_count", "oldest_queued_age")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_QUEUED_AGE_FIELD_NUMBER: _ClassVar[int]
    priority: int
    queued_count: int
    oldest_queued_age: _duration_pb2.Duration
    def __init__(self, priority: _Optional[int] = ..., queued_count: _Optional[int] = ..., oldest_queued_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TaskTypeStats(_message.Message):
    __slots__ = ("task_type", "sample_count", "duration_p50", "duration_p95")
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DURATION_P50_FIELD_NUMBER: _ClassVar[int]
    DURATION_P95_FIELD_NUMBER: _ClassVar[int]
    task_type: str
    sample_count: int
    duration_p50: _duration_pb2.Duration
    duration_p95: _duration_pb2.Duration
    def __init__(self, task_type: _Optional[str] = ..., sample_count: _Optional[int] = ..., duration_p50: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., duration_p95: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnmatchedLabels(_message.Message):
    __slots__ = ("labels", "queued_count")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    queued_count: int
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., queued_count: _Optional[int] = ...) -> None: ...

class QueueRules(_message.Message):
    __slots__ = ("ageing_interval", "match_labels", "affinity", "longest_first", "hedging", "weighted_share")
    AGEING_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MATCH_LABELS_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    HEDGING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SHARE_FIELD_NUMBER: _ClassVar[int]
    ageing_interval: _duration_pb2.Duration
    match_labels: bool
    affinity: bool
    longest_first: bool
    hedging: bool
    weighted_share: bool
    def __init__(self, ageing_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., match_labels: bool = ..., affinity: bool = ..., longest_first: bool = ..., hedging: bool = ..., weighted_share: bool = ...) -> None: ...
