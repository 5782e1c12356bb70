from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dialect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIALECT_UNSPECIFIED: _ClassVar[Dialect]
    DIALECT_OPENAI: _ClassVar[Dialect]
    DIALECT_ANTHROPIC: _ClassVar[Dialect]
    DIALECT_AZURE_OPENAI: _ClassVar[Dialect]
    DIALECT_LITELLM: _ClassVar[Dialect]

class Api(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    API_UNSPECIFIED: _ClassVar[Api]
    API_CHAT_COMPLETIONS: _ClassVar[Api]
    API_COMPLETIONS: _ClassVar[Api]
    API_RESPONSES: _ClassVar[Api]
    API_EMBEDDINGS: _ClassVar[Api]
    API_MESSAGES: _ClassVar[Api]
    API_COUNT_TOKENS: _ClassVar[Api]

class Engine(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_UNSPECIFIED: _ClassVar[Engine]
    ENGINE_VLLM: _ClassVar[Engine]
    ENGINE_SGLANG: _ClassVar[Engine]
    ENGINE_FULMEN: _ClassVar[Engine]

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]
DIALECT_UNSPECIFIED: Dialect
DIALECT_OPENAI: Dialect
DIALECT_ANTHROPIC: Dialect
DIALECT_AZURE_OPENAI: Dialect
DIALECT_LITELLM: Dialect
API_UNSPECIFIED: Api
API_CHAT_COMPLETIONS: Api
API_COMPLETIONS: Api
API_RESPONSES: Api
API_EMBEDDINGS: Api
API_MESSAGES: Api
API_COUNT_TOKENS: Api
ENGINE_UNSPECIFIED: Engine
ENGINE_VLLM: Engine
ENGINE_SGLANG: Engine
ENGINE_FULMEN: Engine
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState

class Backend(_message.Message):
    __slots__ = ("name", "base_url", "dialect", "key_name", "returns_token_ids", "max_in_flight", "draining", "requests_per_minute", "tokens_per_minute", "api_version", "apis", "engine", "hold_until_time", "health_path", "project", "stale_version", "headers", "drop_params", "file", "provider", "region")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    RETURNS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    APIS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    HOLD_UNTIL_TIME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_PATH_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    STALE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    DROP_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_url: str
    dialect: Dialect
    key_name: str
    returns_token_ids: bool
    max_in_flight: int
    draining: bool
    requests_per_minute: int
    tokens_per_minute: int
    api_version: str
    apis: _containers.RepeatedScalarFieldContainer[Api]
    engine: Engine
    hold_until_time: _timestamp_pb2.Timestamp
    health_path: str
    project: str
    stale_version: int
    headers: _containers.ScalarMap[str, str]
    drop_params: bool
    file: str
    provider: str
    region: str
    def __init__(self, name: _Optional[str] = ..., base_url: _Optional[str] = ..., dialect: _Optional[_Union[Dialect, str]] = ..., key_name: _Optional[str] = ..., returns_token_ids: bool = ..., max_in_flight: _Optional[int] = ..., draining: bool = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., api_version: _Optional[str] = ..., apis: _Optional[_Iterable[_Union[Api, str]]] = ..., engine: _Optional[_Union[Engine, str]] = ..., hold_until_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., health_path: _Optional[str] = ..., project: _Optional[str] = ..., stale_version: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., drop_params: bool = ..., file: _Optional[str] = ..., provider: _Optional[str] = ..., region: _Optional[str] = ...) -> None: ...

class BackendHealth(_message.Message):
    __slots__ = ("name", "healthy", "in_flight_count", "request_count", "failure_count", "last_failure_time", "breaker", "waiting_count", "last_failure_kind", "engine_waiting_count", "engine_cache_usage", "stale_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_TIME_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    STALE_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    healthy: bool
    in_flight_count: int
    request_count: int
    failure_count: int
    last_failure_time: _timestamp_pb2.Timestamp
    breaker: BreakerState
    waiting_count: int
    last_failure_kind: str
    engine_waiting_count: int
    engine_cache_usage: float
    stale_version: int
    def __init__(self, name: _Optional[str] = ..., healthy: bool = ..., in_flight_count: _Optional[int] = ..., request_count: _Optional[int] = ..., failure_count: _Optional[int] = ..., last_failure_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., breaker: _Optional[_Union[BreakerState, str]] = ..., waiting_count: _Optional[int] = ..., last_failure_kind: _Optional[str] = ..., engine_waiting_count: _Optional[int] = ..., engine_cache_usage: _Optional[float] = ..., stale_version: _Optional[int] = ...) -> None: ...
