from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("training_run", "rank")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    rank: int
    def __init__(self, training_run: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("membership_epoch", "member_count")
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    membership_epoch: int
    member_count: int
    def __init__(self, membership_epoch: _Optional[int] = ..., member_count: _Optional[int] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: GradientChunk
    def __init__(self, chunk: _Optional[_Union[GradientChunk, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: GradientChunk
    def __init__(self, chunk: _Optional[_Union[GradientChunk, _Mapping]] = ...) -> None: ...

class GradientChunk(_message.Message):
    __slots__ = ("membership_epoch", "round", "bucket", "codec", "codec_version", "offset_bytes", "total_bytes", "data", "crc32c")
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    membership_epoch: int
    round: int
    bucket: int
    codec: str
    codec_version: int
    offset_bytes: int
    total_bytes: int
    data: bytes
    crc32c: int
    def __init__(self, membership_epoch: _Optional[int] = ..., round: _Optional[int] = ..., bucket: _Optional[int] = ..., codec: _Optional[str] = ..., codec_version: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class GetRoundRequest(_message.Message):
    __slots__ = ("training_run", "round")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    round: int
    def __init__(self, training_run: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class GetRoundResponse(_message.Message):
    __slots__ = ("ranks", "raw_bytes", "sent_bytes")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    raw_bytes: int
    sent_bytes: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., raw_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...
