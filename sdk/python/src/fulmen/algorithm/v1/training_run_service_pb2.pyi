from fulmen.algorithm.v1 import algorithm_pb2 as _algorithm_pb2
from fulmen.algorithm.v1 import prompt_search_pb2 as _prompt_search_pb2
from fulmen.algorithm.v1 import training_run_pb2 as _training_run_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListAlgorithmsRequest(_message.Message):
    __slots__ = ("algorithm",)
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    def __init__(self, algorithm: _Optional[str] = ...) -> None: ...

class ListAlgorithmsResponse(_message.Message):
    __slots__ = ("algorithms",)
    ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    algorithms: _containers.RepeatedCompositeFieldContainer[_algorithm_pb2.Algorithm]
    def __init__(self, algorithms: _Optional[_Iterable[_Union[_algorithm_pb2.Algorithm, _Mapping]]] = ...) -> None: ...

class CreateTrainingRunRequest(_message.Message):
    __slots__ = ("training_run", "request_id", "validate_only", "next_stages")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    NEXT_STAGES_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    request_id: str
    validate_only: bool
    next_stages: _containers.RepeatedCompositeFieldContainer[_training_run_pb2.TrainingRun]
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: bool = ..., next_stages: _Optional[_Iterable[_Union[_training_run_pb2.TrainingRun, _Mapping]]] = ...) -> None: ...

class CreateTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class PlanTrainingRunRequest(_message.Message):
    __slots__ = ("training_run", "next_stages")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    NEXT_STAGES_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    next_stages: _containers.RepeatedCompositeFieldContainer[_training_run_pb2.TrainingRun]
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ..., next_stages: _Optional[_Iterable[_Union[_training_run_pb2.TrainingRun, _Mapping]]] = ...) -> None: ...

class PlanTrainingRunResponse(_message.Message):
    __slots__ = ("plans", "measured")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[GpuPlan]
    measured: _containers.RepeatedCompositeFieldContainer[MeasuredSteps]
    def __init__(self, plans: _Optional[_Iterable[_Union[GpuPlan, _Mapping]]] = ..., measured: _Optional[_Iterable[_Union[MeasuredSteps, _Mapping]]] = ...) -> None: ...

class MeasuredSteps(_message.Message):
    __slots__ = ("training_run", "steps", "step_seconds", "packing_efficiency")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PACKING_EFFICIENCY_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    steps: int
    step_seconds: float
    packing_efficiency: float
    def __init__(self, training_run: _Optional[str] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., packing_efficiency: _Optional[float] = ...) -> None: ...

class GpuPlan(_message.Message):
    __slots__ = ("text", "problems")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    text: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateTrainingRunRequest(_message.Message):
    __slots__ = ("name", "display_name", "tags")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    display_name: str
    tags: TagList
    def __init__(self, name: _Optional[str] = ..., display_name: _Optional[str] = ..., tags: _Optional[_Union[TagList, _Mapping]] = ...) -> None: ...

class TagList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class GetTrainingRunRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class ListTrainingRunsRequest(_message.Message):
    __slots__ = ("project", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTrainingRunsResponse(_message.Message):
    __slots__ = ("training_runs", "next_page_token")
    TRAINING_RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    training_runs: _containers.RepeatedCompositeFieldContainer[_training_run_pb2.TrainingRun]
    next_page_token: str
    def __init__(self, training_runs: _Optional[_Iterable[_Union[_training_run_pb2.TrainingRun, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchTrainingRunRequest(_message.Message):
    __slots__ = ("name", "after_sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchTrainingRunResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _training_run_pb2.TrainingRunEvent
    def __init__(self, event: _Optional[_Union[_training_run_pb2.TrainingRunEvent, _Mapping]] = ...) -> None: ...

class PauseTrainingRunRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PauseTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class ResumeTrainingRunRequest(_message.Message):
    __slots__ = ("name", "pause_at_step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_AT_STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    pause_at_step: int
    def __init__(self, name: _Optional[str] = ..., pause_at_step: _Optional[int] = ...) -> None: ...

class ResumeTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class CancelTrainingRunRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CancelTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[_training_run_pb2.Checkpoint]
    next_page_token: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[_training_run_pb2.Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RollbackTrainingRunRequest(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    def __init__(self, checkpoint: _Optional[str] = ...) -> None: ...

class RollbackTrainingRunResponse(_message.Message):
    __slots__ = ("training_run",)
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    training_run: _training_run_pb2.TrainingRun
    def __init__(self, training_run: _Optional[_Union[_training_run_pb2.TrainingRun, _Mapping]] = ...) -> None: ...

class GetTrainingRunReportRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTrainingRunReportResponse(_message.Message):
    __slots__ = ("markdown", "curve_png")
    MARKDOWN_FIELD_NUMBER: _ClassVar[int]
    CURVE_PNG_FIELD_NUMBER: _ClassVar[int]
    markdown: str
    curve_png: bytes
    def __init__(self, markdown: _Optional[str] = ..., curve_png: _Optional[bytes] = ...) -> None: ...
