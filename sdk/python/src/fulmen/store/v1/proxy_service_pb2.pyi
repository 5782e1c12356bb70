from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CaptureAccount(_message.Message):
    __slots__ = ("attempt", "open", "call_count", "infra_failure_count", "unusable_count", "prompt_token_count", "completion_token_count", "throttled_count")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    INFRA_FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    open: bool
    call_count: int
    infra_failure_count: int
    unusable_count: int
    prompt_token_count: int
    completion_token_count: int
    throttled_count: int
    def __init__(self, attempt: _Optional[str] = ..., open: bool = ..., call_count: _Optional[int] = ..., infra_failure_count: _Optional[int] = ..., unusable_count: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., throttled_count: _Optional[int] = ...) -> None: ...

class SyncProxyRequest(_message.Message):
    __slots__ = ("instance_id", "accounts", "serves_alone", "leaving")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    SERVES_ALONE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    accounts: _containers.RepeatedCompositeFieldContainer[CaptureAccount]
    serves_alone: bool
    leaving: bool
    def __init__(self, instance_id: _Optional[str] = ..., accounts: _Optional[_Iterable[_Union[CaptureAccount, _Mapping]]] = ..., serves_alone: bool = ..., leaving: bool = ...) -> None: ...

class SyncProxyResponse(_message.Message):
    __slots__ = ("store_time", "other_count")
    STORE_TIME_FIELD_NUMBER: _ClassVar[int]
    OTHER_COUNT_FIELD_NUMBER: _ClassVar[int]
    store_time: _timestamp_pb2.Timestamp
    other_count: int
    def __init__(self, store_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., other_count: _Optional[int] = ...) -> None: ...

class GetCaptureTotalsRequest(_message.Message):
    __slots__ = ("attempts", "except_instance_id")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    EXCEPT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[str]
    except_instance_id: str
    def __init__(self, attempts: _Optional[_Iterable[str]] = ..., except_instance_id: _Optional[str] = ...) -> None: ...

class GetCaptureTotalsResponse(_message.Message):
    __slots__ = ("totals",)
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    totals: _containers.RepeatedCompositeFieldContainer[CaptureTotals]
    def __init__(self, totals: _Optional[_Iterable[_Union[CaptureTotals, _Mapping]]] = ...) -> None: ...

class CaptureTotals(_message.Message):
    __slots__ = ("sum", "lost")
    SUM_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sum: CaptureAccount
    lost: bool
    def __init__(self, sum: _Optional[_Union[CaptureAccount, _Mapping]] = ..., lost: bool = ...) -> None: ...
