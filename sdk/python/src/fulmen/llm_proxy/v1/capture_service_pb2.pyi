from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FlushCapturesRequest(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCapturesResponse(_message.Message):
    __slots__ = ("summaries", "instance_id")
    SUMMARIES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    summaries: _containers.RepeatedCompositeFieldContainer[CaptureSummary]
    instance_id: str
    def __init__(self, summaries: _Optional[_Iterable[_Union[CaptureSummary, _Mapping]]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class CaptureSummary(_message.Message):
    __slots__ = ("attempt", "flushed", "call_count", "infra_failure_count", "unusable_count", "prompt_token_count", "completion_token_count", "throttled_count", "lost")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    INFRA_FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    flushed: bool
    call_count: int
    infra_failure_count: int
    unusable_count: int
    prompt_token_count: int
    completion_token_count: int
    throttled_count: int
    lost: bool
    def __init__(self, attempt: _Optional[str] = ..., flushed: bool = ..., call_count: _Optional[int] = ..., infra_failure_count: _Optional[int] = ..., unusable_count: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., throttled_count: _Optional[int] = ..., lost: bool = ...) -> None: ...
