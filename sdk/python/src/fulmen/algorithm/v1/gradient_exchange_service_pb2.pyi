from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeTerms(_message.Message):
    __slots__ = ("world_size", "shard", "shard_count", "layout_digest", "codec", "codec_version", "codec_settings_json", "segment_sizes", "quorum", "min_wait_s", "max_wait_s", "straggler_timeout_s", "lease_s")
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_SIZES_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    MIN_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    world_size: int
    shard: int
    shard_count: int
    layout_digest: str
    codec: str
    codec_version: int
    codec_settings_json: str
    segment_sizes: _containers.RepeatedScalarFieldContainer[int]
    quorum: float
    min_wait_s: float
    max_wait_s: float
    straggler_timeout_s: float
    lease_s: float
    def __init__(self, world_size: _Optional[int] = ..., shard: _Optional[int] = ..., shard_count: _Optional[int] = ..., layout_digest: _Optional[str] = ..., codec: _Optional[str] = ..., codec_version: _Optional[int] = ..., codec_settings_json: _Optional[str] = ..., segment_sizes: _Optional[_Iterable[int]] = ..., quorum: _Optional[float] = ..., min_wait_s: _Optional[float] = ..., max_wait_s: _Optional[float] = ..., straggler_timeout_s: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("training_run", "rank", "incarnation", "terms", "round", "membership_epoch", "known_member_count", "call", "history")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    rank: int
    incarnation: str
    terms: ExchangeTerms
    round: int
    membership_epoch: int
    known_member_count: int
    call: int
    history: str
    def __init__(self, training_run: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ..., terms: _Optional[_Union[ExchangeTerms, _Mapping]] = ..., round: _Optional[int] = ..., membership_epoch: _Optional[int] = ..., known_member_count: _Optional[int] = ..., call: _Optional[int] = ..., history: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("membership_epoch", "member_count", "ranks", "round", "first_round", "history")
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    membership_epoch: int
    member_count: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    round: int
    first_round: int
    history: str
    def __init__(self, membership_epoch: _Optional[int] = ..., member_count: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., first_round: _Optional[int] = ..., history: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("training_run", "shard", "rank", "incarnation")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    shard: int
    rank: int
    incarnation: str
    def __init__(self, training_run: _Optional[str] = ..., shard: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenExchange(_message.Message):
    __slots__ = ("training_run", "shard", "rank", "incarnation")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    shard: int
    rank: int
    incarnation: str
    def __init__(self, training_run: _Optional[str] = ..., shard: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("chunk", "open")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    chunk: GradientChunk
    open: OpenExchange
    def __init__(self, chunk: _Optional[_Union[GradientChunk, _Mapping]] = ..., open: _Optional[_Union[OpenExchange, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("chunk", "status")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    chunk: GradientChunk
    status: SegmentStatus
    def __init__(self, chunk: _Optional[_Union[GradientChunk, _Mapping]] = ..., status: _Optional[_Union[SegmentStatus, _Mapping]] = ...) -> None: ...

class GradientChunk(_message.Message):
    __slots__ = ("membership_epoch", "round", "bucket", "codec", "codec_version", "offset_bytes", "total_bytes", "data", "crc32", "call", "settings", "head_crc32")
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    HEAD_CRC32_FIELD_NUMBER: _ClassVar[int]
    membership_epoch: int
    round: int
    bucket: int
    codec: str
    codec_version: int
    offset_bytes: int
    total_bytes: int
    data: bytes
    crc32: int
    call: int
    settings: CallSettings
    head_crc32: int
    def __init__(self, membership_epoch: _Optional[int] = ..., round: _Optional[int] = ..., bucket: _Optional[int] = ..., codec: _Optional[str] = ..., codec_version: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ..., call: _Optional[int] = ..., settings: _Optional[_Union[CallSettings, _Mapping]] = ..., head_crc32: _Optional[int] = ...) -> None: ...

class CallSettings(_message.Message):
    __slots__ = ("number", "ratio", "seed", "flush")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    number: int
    ratio: float
    seed: int
    flush: bool
    def __init__(self, number: _Optional[int] = ..., ratio: _Optional[float] = ..., seed: _Optional[int] = ..., flush: bool = ...) -> None: ...

class SegmentStatus(_message.Message):
    __slots__ = ("round", "call", "status", "text", "offset_bytes", "membership_epoch", "ranks", "member_count", "reply_bytes")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[SegmentStatus.Status]
        STATUS_ACCEPTED: _ClassVar[SegmentStatus.Status]
        STATUS_LATE: _ClassVar[SegmentStatus.Status]
        STATUS_DUPLICATE: _ClassVar[SegmentStatus.Status]
        STATUS_BAD_CHECKSUM: _ClassVar[SegmentStatus.Status]
        STATUS_STALE_EPOCH: _ClassVar[SegmentStatus.Status]
        STATUS_INVALID: _ClassVar[SegmentStatus.Status]
        STATUS_BEHIND: _ClassVar[SegmentStatus.Status]
    STATUS_UNSPECIFIED: SegmentStatus.Status
    STATUS_ACCEPTED: SegmentStatus.Status
    STATUS_LATE: SegmentStatus.Status
    STATUS_DUPLICATE: SegmentStatus.Status
    STATUS_BAD_CHECKSUM: SegmentStatus.Status
    STATUS_STALE_EPOCH: SegmentStatus.Status
    STATUS_INVALID: SegmentStatus.Status
    STATUS_BEHIND: SegmentStatus.Status
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    round: int
    call: int
    status: SegmentStatus.Status
    text: str
    offset_bytes: int
    membership_epoch: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    member_count: int
    reply_bytes: int
    def __init__(self, round: _Optional[int] = ..., call: _Optional[int] = ..., status: _Optional[_Union[SegmentStatus.Status, str]] = ..., text: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., membership_epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., member_count: _Optional[int] = ..., reply_bytes: _Optional[int] = ...) -> None: ...

class GetRoundRequest(_message.Message):
    __slots__ = ("training_run", "round", "shard")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    round: int
    shard: int
    def __init__(self, training_run: _Optional[str] = ..., round: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class GetRoundResponse(_message.Message):
    __slots__ = ("ranks", "raw_bytes", "sent_bytes", "reply_bytes", "late_ranks", "duration_s")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATE_RANKS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    raw_bytes: int
    sent_bytes: int
    reply_bytes: int
    late_ranks: _containers.RepeatedScalarFieldContainer[int]
    duration_s: float
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., raw_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., reply_bytes: _Optional[int] = ..., late_ranks: _Optional[_Iterable[int]] = ..., duration_s: _Optional[float] = ...) -> None: ...

class GetExchangeRequest(_message.Message):
    __slots__ = ("training_run", "page_token")
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    training_run: str
    page_token: str
    def __init__(self, training_run: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetExchangeResponse(_message.Message):
    __slots__ = ("shards", "next_page_token")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    next_page_token: str
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("terms", "membership_epoch", "round", "members", "received_bytes", "sent_bytes", "ratio", "sum_count", "partial_sum_count", "bad_checksum_count", "removed_member_count", "lost_residual_count", "wait_s")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    SUM_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_SUM_COUNT_FIELD_NUMBER: _ClassVar[int]
    BAD_CHECKSUM_COUNT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_RESIDUAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    terms: ExchangeTerms
    membership_epoch: int
    round: int
    members: _containers.RepeatedCompositeFieldContainer[ExchangeMember]
    received_bytes: int
    sent_bytes: int
    ratio: float
    sum_count: int
    partial_sum_count: int
    bad_checksum_count: int
    removed_member_count: int
    lost_residual_count: int
    wait_s: float
    def __init__(self, terms: _Optional[_Union[ExchangeTerms, _Mapping]] = ..., membership_epoch: _Optional[int] = ..., round: _Optional[int] = ..., members: _Optional[_Iterable[_Union[ExchangeMember, _Mapping]]] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., ratio: _Optional[float] = ..., sum_count: _Optional[int] = ..., partial_sum_count: _Optional[int] = ..., bad_checksum_count: _Optional[int] = ..., removed_member_count: _Optional[int] = ..., lost_residual_count: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ExchangeMember(_message.Message):
    __slots__ = ("rank", "first_round", "round", "late_count", "idle_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    first_round: int
    round: int
    late_count: int
    idle_s: float
    def __init__(self, rank: _Optional[int] = ..., first_round: _Optional[int] = ..., round: _Optional[int] = ..., late_count: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...
