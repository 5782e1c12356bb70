from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpanCodec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_CODEC_UNSPECIFIED: _ClassVar[SpanCodec]
    SPAN_CODEC_IDENTITY: _ClassVar[SpanCodec]
    SPAN_CODEC_ZSTD: _ClassVar[SpanCodec]
SPAN_CODEC_UNSPECIFIED: SpanCodec
SPAN_CODEC_IDENTITY: SpanCodec
SPAN_CODEC_ZSTD: SpanCodec

class SpanChunk(_message.Message):
    __slots__ = ("attempt", "chunk_id", "span_count", "codec", "payload", "start_time", "end_time")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    chunk_id: str
    span_count: int
    codec: SpanCodec
    payload: bytes
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    def __init__(self, attempt: _Optional[str] = ..., chunk_id: _Optional[str] = ..., span_count: _Optional[int] = ..., codec: _Optional[_Union[SpanCodec, str]] = ..., payload: _Optional[bytes] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class SpanBatch(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[SpanRecord]
    def __init__(self, spans: _Optional[_Iterable[_Union[SpanRecord, _Mapping]]] = ...) -> None: ...

class SpanRecord(_message.Message):
    __slots__ = ("otlp_span", "model_call", "scope", "otlp_resource")
    OTLP_SPAN_FIELD_NUMBER: _ClassVar[int]
    MODEL_CALL_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    OTLP_RESOURCE_FIELD_NUMBER: _ClassVar[int]
    otlp_span: bytes
    model_call: bytes
    scope: str
    otlp_resource: bytes
    def __init__(self, otlp_span: _Optional[bytes] = ..., model_call: _Optional[bytes] = ..., scope: _Optional[str] = ..., otlp_resource: _Optional[bytes] = ...) -> None: ...
