from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Reward(_message.Message):
    __slots__ = ("dimension", "value", "step", "span_id")
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    dimension: str
    value: float
    step: int
    span_id: bytes
    def __init__(self, dimension: _Optional[str] = ..., value: _Optional[float] = ..., step: _Optional[int] = ..., span_id: _Optional[bytes] = ...) -> None: ...
