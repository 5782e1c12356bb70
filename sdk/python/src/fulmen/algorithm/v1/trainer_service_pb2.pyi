from fulmen.algorithm.v1 import training_run_pb2 as _training_run_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GradientReduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRADIENT_REDUCTION_UNSPECIFIED: _ClassVar[GradientReduction]
    GRADIENT_REDUCTION_MEAN: _ClassVar[GradientReduction]
    GRADIENT_REDUCTION_SUM: _ClassVar[GradientReduction]
GRADIENT_REDUCTION_UNSPECIFIED: GradientReduction
GRADIENT_REDUCTION_MEAN: GradientReduction
GRADIENT_REDUCTION_SUM: GradientReduction

class TrainerLora(_message.Message):
    __slots__ = ("rank", "alpha", "dropout", "targets")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    dropout: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., dropout: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class AdamSettings(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ..., weight_decay: _Optional[float] = ..., max_grad_norm: _Optional[float] = ...) -> None: ...

class TrainerCheckpoint(_message.Message):
    __slots__ = ("name", "step", "size_bytes", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    size_bytes: int
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., size_bytes: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Trainer(_message.Message):
    __slots__ = ("name", "policy", "lora", "adam", "seed", "autosave_steps", "step", "sequence", "saved_sequence", "loaded", "policy_version", "checkpoints", "max_tokens", "create_time", "use_time", "weight_sum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    AUTOSAVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAVED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    USE_TIME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy: _training_run_pb2.PolicySpec
    lora: TrainerLora
    adam: AdamSettings
    seed: int
    autosave_steps: int
    step: int
    sequence: int
    saved_sequence: int
    loaded: bool
    policy_version: str
    checkpoints: _containers.RepeatedCompositeFieldContainer[TrainerCheckpoint]
    max_tokens: int
    create_time: _timestamp_pb2.Timestamp
    use_time: _timestamp_pb2.Timestamp
    weight_sum: float
    def __init__(self, name: _Optional[str] = ..., policy: _Optional[_Union[_training_run_pb2.PolicySpec, _Mapping]] = ..., lora: _Optional[_Union[TrainerLora, _Mapping]] = ..., adam: _Optional[_Union[AdamSettings, _Mapping]] = ..., seed: _Optional[int] = ..., autosave_steps: _Optional[int] = ..., step: _Optional[int] = ..., sequence: _Optional[int] = ..., saved_sequence: _Optional[int] = ..., loaded: bool = ..., policy_version: _Optional[str] = ..., checkpoints: _Optional[_Iterable[_Union[TrainerCheckpoint, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., use_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., weight_sum: _Optional[float] = ...) -> None: ...

class CreateTrainerRequest(_message.Message):
    __slots__ = ("project", "policy", "lora", "adam", "seed", "autosave_steps", "checkpoint", "request_id")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    AUTOSAVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    project: str
    policy: _training_run_pb2.PolicySpec
    lora: TrainerLora
    adam: AdamSettings
    seed: int
    autosave_steps: int
    checkpoint: str
    request_id: str
    def __init__(self, project: _Optional[str] = ..., policy: _Optional[_Union[_training_run_pb2.PolicySpec, _Mapping]] = ..., lora: _Optional[_Union[TrainerLora, _Mapping]] = ..., adam: _Optional[_Union[AdamSettings, _Mapping]] = ..., seed: _Optional[int] = ..., autosave_steps: _Optional[int] = ..., checkpoint: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateTrainerResponse(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: Trainer
    def __init__(self, trainer: _Optional[_Union[Trainer, _Mapping]] = ...) -> None: ...

class GetTrainerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTrainerResponse(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: Trainer
    def __init__(self, trainer: _Optional[_Union[Trainer, _Mapping]] = ...) -> None: ...

class ListTrainersRequest(_message.Message):
    __slots__ = ("project", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTrainersResponse(_message.Message):
    __slots__ = ("trainers", "next_page_token")
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    trainers: _containers.RepeatedCompositeFieldContainer[Trainer]
    next_page_token: str
    def __init__(self, trainers: _Optional[_Iterable[_Union[Trainer, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteTrainerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTrainerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainingRow(_message.Message):
    __slots__ = ("token_ids", "weights", "advantages", "sampler_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    advantages: _containers.RepeatedScalarFieldContainer[float]
    sampler_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., advantages: _Optional[_Iterable[float]] = ..., sampler_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("name", "sequence", "rows", "loss", "loss_settings_json", "temperature", "forward_only", "fresh")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    name: str
    sequence: int
    rows: _containers.RepeatedCompositeFieldContainer[TrainingRow]
    loss: str
    loss_settings_json: str
    temperature: float
    forward_only: bool
    fresh: bool
    def __init__(self, name: _Optional[str] = ..., sequence: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[TrainingRow, _Mapping]]] = ..., loss: _Optional[str] = ..., loss_settings_json: _Optional[str] = ..., temperature: _Optional[float] = ..., forward_only: bool = ..., fresh: bool = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("loss_sum", "weight_sum", "metrics", "rows")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SUM_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    weight_sum: float
    metrics: _containers.ScalarMap[str, float]
    rows: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    def __init__(self, loss_sum: _Optional[float] = ..., weight_sum: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., rows: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("name", "sequence", "adam", "reduction")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    sequence: int
    adam: AdamSettings
    reduction: GradientReduction
    def __init__(self, name: _Optional[str] = ..., sequence: _Optional[int] = ..., adam: _Optional[_Union[AdamSettings, _Mapping]] = ..., reduction: _Optional[_Union[GradientReduction, str]] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("step", "grad_norm", "skipped", "weight_sum")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SUM_FIELD_NUMBER: _ClassVar[int]
    step: int
    grad_norm: float
    skipped: bool
    weight_sum: float
    def __init__(self, step: _Optional[int] = ..., grad_norm: _Optional[float] = ..., skipped: bool = ..., weight_sum: _Optional[float] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("name", "after_sequence", "prompt_ids", "messages_json", "completion_count", "max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "stop_texts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    messages_json: str
    completion_count: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., messages_json: _Optional[str] = ..., completion_count: _Optional[int] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class SampledCompletion(_message.Message):
    __slots__ = ("token_ids", "logprobs", "text", "stopped")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: str
    stopped: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[str] = ..., stopped: bool = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("prompt_ids", "completions", "step")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    completions: _containers.RepeatedCompositeFieldContainer[SampledCompletion]
    step: int
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., completions: _Optional[_Iterable[_Union[SampledCompletion, _Mapping]]] = ..., step: _Optional[int] = ...) -> None: ...

class RenderMessagesRequest(_message.Message):
    __slots__ = ("name", "messages_json", "tools_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    messages_json: str
    tools_json: str
    def __init__(self, name: _Optional[str] = ..., messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ...) -> None: ...

class RenderMessagesResponse(_message.Message):
    __slots__ = ("row",)
    ROW_FIELD_NUMBER: _ClassVar[int]
    row: TrainingRow
    def __init__(self, row: _Optional[_Union[TrainingRow, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("name", "after_sequence", "checkpoint", "unload")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    checkpoint: str
    unload: bool
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ..., checkpoint: _Optional[str] = ..., unload: bool = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: Trainer
    def __init__(self, trainer: _Optional[_Union[Trainer, _Mapping]] = ...) -> None: ...

class PublishVersionRequest(_message.Message):
    __slots__ = ("name", "after_sequence", "alias")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    alias: str
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ..., alias: _Optional[str] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: str
    def __init__(self, policy_version: _Optional[str] = ...) -> None: ...
