from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PayloadHeader(_message.Message):
    __slots__ = ("codec", "codec_version", "element_count", "parts")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    codec: str
    codec_version: int
    element_count: int
    parts: _containers.RepeatedCompositeFieldContainer[PayloadPart]
    def __init__(self, codec: _Optional[str] = ..., codec_version: _Optional[int] = ..., element_count: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PayloadPart, _Mapping]]] = ...) -> None: ...

class PayloadPart(_message.Message):
    __slots__ = ("kind", "count")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[PayloadPart.Kind]
        KIND_INT8: _ClassVar[PayloadPart.Kind]
        KIND_UINT8: _ClassVar[PayloadPart.Kind]
        KIND_INT16: _ClassVar[PayloadPart.Kind]
        KIND_BFLOAT16: _ClassVar[PayloadPart.Kind]
        KIND_FLOAT32: _ClassVar[PayloadPart.Kind]
        KIND_FLOAT16: _ClassVar[PayloadPart.Kind]
        KIND_INT32: _ClassVar[PayloadPart.Kind]
    KIND_UNSPECIFIED: PayloadPart.Kind
    KIND_INT8: PayloadPart.Kind
    KIND_UINT8: PayloadPart.Kind
    KIND_INT16: PayloadPart.Kind
    KIND_BFLOAT16: PayloadPart.Kind
    KIND_FLOAT32: PayloadPart.Kind
    KIND_FLOAT16: PayloadPart.Kind
    KIND_INT32: PayloadPart.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: PayloadPart.Kind
    count: int
    def __init__(self, kind: _Optional[_Union[PayloadPart.Kind, str]] = ..., count: _Optional[int] = ...) -> None: ...
