from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RewardDistribution(_message.Message):
    __slots__ = ("values", "counts", "bin_width")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BIN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    bin_width: float
    def __init__(self, values: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., bin_width: _Optional[float] = ...) -> None: ...
