from fulmen.store.v1 import span_pb2 as _span_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchedForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCHED_FORM_UNSPECIFIED: _ClassVar[WatchedForm]
    WATCHED_FORM_CHUNKS: _ClassVar[WatchedForm]
    WATCHED_FORM_SPANS: _ClassVar[WatchedForm]
    WATCHED_FORM_OUTLINES: _ClassVar[WatchedForm]
WATCHED_FORM_UNSPECIFIED: WatchedForm
WATCHED_FORM_CHUNKS: WatchedForm
WATCHED_FORM_SPANS: WatchedForm
WATCHED_FORM_OUTLINES: WatchedForm

class AppendSpansRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_span_pb2.SpanChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_span_pb2.SpanChunk, _Mapping]]] = ...) -> None: ...

class AppendSpansResponse(_message.Message):
    __slots__ = ("accepted_count", "rejected")
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    accepted_count: int
    rejected: _containers.RepeatedCompositeFieldContainer[RejectedChunk]
    def __init__(self, accepted_count: _Optional[int] = ..., rejected: _Optional[_Iterable[_Union[RejectedChunk, _Mapping]]] = ...) -> None: ...

class RejectedChunk(_message.Message):
    __slots__ = ("chunk_id", "message")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    chunk_id: str
    message: str
    def __init__(self, chunk_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ListSpansRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token", "parents", "filter")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    parents: _containers.RepeatedScalarFieldContainer[str]
    filter: SpanFilter
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., parents: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[SpanFilter, _Mapping]] = ...) -> None: ...

class SpanFilter(_message.Message):
    __slots__ = ("names", "name_prefix", "attributes", "min_end_time", "max_start_time", "min_duration", "errors_only", "model_calls_only", "span_ids")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    MIN_END_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_START_TIME_FIELD_NUMBER: _ClassVar[int]
    MIN_DURATION_FIELD_NUMBER: _ClassVar[int]
    ERRORS_ONLY_FIELD_NUMBER: _ClassVar[int]
    MODEL_CALLS_ONLY_FIELD_NUMBER: _ClassVar[int]
    SPAN_IDS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    name_prefix: str
    attributes: _containers.ScalarMap[str, str]
    min_end_time: _timestamp_pb2.Timestamp
    max_start_time: _timestamp_pb2.Timestamp
    min_duration: _duration_pb2.Duration
    errors_only: bool
    model_calls_only: bool
    span_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., name_prefix: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., min_end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., max_start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., min_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., errors_only: bool = ..., model_calls_only: bool = ..., span_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListSpansResponse(_message.Message):
    __slots__ = ("spans", "next_page_token")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[AttemptSpan]
    next_page_token: str
    def __init__(self, spans: _Optional[_Iterable[_Union[AttemptSpan, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AttemptSpan(_message.Message):
    __slots__ = ("attempt", "span")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    span: _span_pb2.SpanRecord
    def __init__(self, attempt: _Optional[str] = ..., span: _Optional[_Union[_span_pb2.SpanRecord, _Mapping]] = ...) -> None: ...

class StreamSpansRequest(_message.Message):
    __slots__ = ("parents", "training_run", "project", "filter")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[str]
    training_run: str
    project: str
    filter: SpanFilter
    def __init__(self, parents: _Optional[_Iterable[str]] = ..., training_run: _Optional[str] = ..., project: _Optional[str] = ..., filter: _Optional[_Union[SpanFilter, _Mapping]] = ...) -> None: ...

class StreamSpansResponse(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_span_pb2.SpanChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_span_pb2.SpanChunk, _Mapping]]] = ...) -> None: ...

class WatchSpansRequest(_message.Message):
    __slots__ = ("parent", "filter", "cursor", "form")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    parent: str
    filter: SpanFilter
    cursor: str
    form: WatchedForm
    def __init__(self, parent: _Optional[str] = ..., filter: _Optional[_Union[SpanFilter, _Mapping]] = ..., cursor: _Optional[str] = ..., form: _Optional[_Union[WatchedForm, str]] = ...) -> None: ...

class WatchSpansResponse(_message.Message):
    __slots__ = ("chunks", "spans", "cursor")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_span_pb2.SpanChunk]
    spans: _containers.RepeatedCompositeFieldContainer[AttemptSpan]
    cursor: str
    def __init__(self, chunks: _Optional[_Iterable[_Union[_span_pb2.SpanChunk, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[AttemptSpan, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...
