from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Route(_message.Message):
    __slots__ = ("name", "targets", "overrides", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    targets: _containers.RepeatedCompositeFieldContainer[RouteTarget]
    overrides: _containers.RepeatedCompositeFieldContainer[ModeOverride]
    version: int
    def __init__(self, name: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[RouteTarget, _Mapping]]] = ..., overrides: _Optional[_Iterable[_Union[ModeOverride, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

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
