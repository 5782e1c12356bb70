from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Balancing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BALANCING_UNSPECIFIED: _ClassVar[Balancing]
    BALANCING_STICKY: _ClassVar[Balancing]
    BALANCING_PREFIX_CACHE: _ClassVar[Balancing]
    BALANCING_LEAST_OUTSTANDING: _ClassVar[Balancing]
BALANCING_UNSPECIFIED: Balancing
BALANCING_STICKY: Balancing
BALANCING_PREFIX_CACHE: Balancing
BALANCING_LEAST_OUTSTANDING: Balancing

class Route(_message.Message):
    __slots__ = ("name", "targets", "overrides", "version", "balancing", "fallbacks", "deadline", "hedge_delay", "cached", "recording", "project", "rolling_versions", "file")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BALANCING_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    HEDGE_DELAY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ROLLING_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    name: str
    targets: _containers.RepeatedCompositeFieldContainer[RouteTarget]
    overrides: _containers.RepeatedCompositeFieldContainer[ModeOverride]
    version: int
    balancing: Balancing
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    deadline: _duration_pb2.Duration
    hedge_delay: _duration_pb2.Duration
    cached: bool
    recording: Recording
    project: str
    rolling_versions: bool
    file: str
    def __init__(self, name: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[RouteTarget, _Mapping]]] = ..., overrides: _Optional[_Iterable[_Union[ModeOverride, _Mapping]]] = ..., version: _Optional[int] = ..., balancing: _Optional[_Union[Balancing, str]] = ..., fallbacks: _Optional[_Iterable[str]] = ..., deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., hedge_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., cached: bool = ..., recording: _Optional[_Union[Recording, _Mapping]] = ..., project: _Optional[str] = ..., rolling_versions: bool = ..., file: _Optional[str] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("sample_rate", "redact", "patterns", "retention")
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    REDACT_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    sample_rate: float
    redact: _containers.RepeatedScalarFieldContainer[str]
    patterns: _containers.RepeatedCompositeFieldContainer[RedactionPattern]
    retention: _duration_pb2.Duration
    def __init__(self, sample_rate: _Optional[float] = ..., redact: _Optional[_Iterable[str]] = ..., patterns: _Optional[_Iterable[_Union[RedactionPattern, _Mapping]]] = ..., retention: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RedactionPattern(_message.Message):
    __slots__ = ("name", "expression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expression: str
    def __init__(self, name: _Optional[str] = ..., expression: _Optional[str] = ...) -> None: ...

class RouteTarget(_message.Message):
    __slots__ = ("backend", "backend_model", "weight", "policy", "policy_version")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    backend: str
    backend_model: str
    weight: int
    policy: str
    policy_version: int
    def __init__(self, backend: _Optional[str] = ..., backend_model: _Optional[str] = ..., weight: _Optional[int] = ..., policy: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class ModeOverride(_message.Message):
    __slots__ = ("mode", "request_fields_json")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    mode: str
    request_fields_json: str
    def __init__(self, mode: _Optional[str] = ..., request_fields_json: _Optional[str] = ...) -> None: ...
