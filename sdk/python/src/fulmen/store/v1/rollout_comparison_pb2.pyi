from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutSide(_message.Message):
    __slots__ = ("training_run", "filter", "group_id_prefix")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    filter: str
    group_id_prefix: str
    def __init__(self, training_run: _Optional[str] = ..., filter: _Optional[str] = ..., group_id_prefix: _Optional[str] = ...) -> None: ...

class CompareRolloutsRequest(_message.Message):
    __slots__ = ("project", "baseline", "candidate", "failure_reward", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REWARD_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    baseline: RolloutSide
    candidate: RolloutSide
    failure_reward: float
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., baseline: _Optional[_Union[RolloutSide, _Mapping]] = ..., candidate: _Optional[_Union[RolloutSide, _Mapping]] = ..., failure_reward: _Optional[float] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class CompareRolloutsResponse(_message.Message):
    __slots__ = ("task_count", "win_count", "loss_count", "tie_count", "baseline_mean", "candidate_mean", "mean_difference", "difference_low", "difference_high", "interval_method", "pairs", "next_page_token", "baseline", "candidate")
    TASK_COUNT_FIELD_NUMBER: _ClassVar[int]
    WIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOSS_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BASELINE_MEAN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_MEAN_FIELD_NUMBER: _ClassVar[int]
    MEAN_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_LOW_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_HIGH_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_METHOD_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    task_count: int
    win_count: int
    loss_count: int
    tie_count: int
    baseline_mean: float
    candidate_mean: float
    mean_difference: float
    difference_low: float
    difference_high: float
    interval_method: str
    pairs: _containers.RepeatedCompositeFieldContainer[TaskPair]
    next_page_token: str
    baseline: SideCounts
    candidate: SideCounts
    def __init__(self, task_count: _Optional[int] = ..., win_count: _Optional[int] = ..., loss_count: _Optional[int] = ..., tie_count: _Optional[int] = ..., baseline_mean: _Optional[float] = ..., candidate_mean: _Optional[float] = ..., mean_difference: _Optional[float] = ..., difference_low: _Optional[float] = ..., difference_high: _Optional[float] = ..., interval_method: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[TaskPair, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., baseline: _Optional[_Union[SideCounts, _Mapping]] = ..., candidate: _Optional[_Union[SideCounts, _Mapping]] = ...) -> None: ...

class SideCounts(_message.Message):
    __slots__ = ("scored_count", "unscored_count", "unpaired_task_count")
    SCORED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNPAIRED_TASK_COUNT_FIELD_NUMBER: _ClassVar[int]
    scored_count: int
    unscored_count: int
    unpaired_task_count: int
    def __init__(self, scored_count: _Optional[int] = ..., unscored_count: _Optional[int] = ..., unpaired_task_count: _Optional[int] = ...) -> None: ...

class TaskPair(_message.Message):
    __slots__ = ("input", "baseline_reward", "candidate_reward", "baseline_rollouts", "candidate_rollouts")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    BASELINE_REWARD_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_REWARD_FIELD_NUMBER: _ClassVar[int]
    BASELINE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    input: bytes
    baseline_reward: float
    candidate_reward: float
    baseline_rollouts: _containers.RepeatedScalarFieldContainer[str]
    candidate_rollouts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, input: _Optional[bytes] = ..., baseline_reward: _Optional[float] = ..., candidate_reward: _Optional[float] = ..., baseline_rollouts: _Optional[_Iterable[str]] = ..., candidate_rollouts: _Optional[_Iterable[str]] = ...) -> None: ...
