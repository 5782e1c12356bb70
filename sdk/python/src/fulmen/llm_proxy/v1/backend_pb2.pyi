from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dialect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIALECT_UNSPECIFIED: _ClassVar[Dialect]
    DIALECT_OPENAI: _ClassVar[Dialect]
    DIALECT_ANTHROPIC: _ClassVar[Dialect]
DIALECT_UNSPECIFIED: Dialect
DIALECT_OPENAI: Dialect
DIALECT_ANTHROPIC: Dialect

class Backend(_message.Message):
    __slots__ = ("name", "base_url", "dialect", "key_name", "returns_token_ids", "max_in_flight", "draining", "requests_per_minute", "tokens_per_minute")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    RETURNS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_url: str
    dialect: Dialect
    key_name: str
    returns_token_ids: bool
    max_in_flight: int
    draining: bool
    requests_per_minute: int
    tokens_per_minute: int
    def __init__(self, name: _Optional[str] = ..., base_url: _Optional[str] = ..., dialect: _Optional[_Union[Dialect, str]] = ..., key_name: _Optional[str] = ..., returns_token_ids: bool = ..., max_in_flight: _Optional[int] = ..., draining: bool = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ...) -> None: ...

class BackendHealth(_message.Message):
    __slots__ = ("name", "healthy", "in_flight_count", "request_count", "failure_count", "last_failure_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    healthy: bool
    in_flight_count: int
    request_count: int
    failure_count: int
    last_failure_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., healthy: bool = ..., in_flight_count: _Optional[int] = ..., request_count: _Optional[int] = ..., failure_count: _Optional[int] = ..., last_failure_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
