from fulmen.llm_proxy.v1 import backend_pb2 as _backend_pb2
from fulmen.llm_proxy.v1 import route_pb2 as _route_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyFileRequest(_message.Message):
    __slots__ = ("file", "backends", "routes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    file: str
    backends: _containers.RepeatedCompositeFieldContainer[_backend_pb2.Backend]
    routes: _containers.RepeatedCompositeFieldContainer[_route_pb2.Route]
    def __init__(self, file: _Optional[str] = ..., backends: _Optional[_Iterable[_Union[_backend_pb2.Backend, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[_route_pb2.Route, _Mapping]]] = ...) -> None: ...

class ApplyFileResponse(_message.Message):
    __slots__ = ("added", "changed", "deleted")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[str]
    changed: _containers.RepeatedScalarFieldContainer[str]
    deleted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, added: _Optional[_Iterable[str]] = ..., changed: _Optional[_Iterable[str]] = ..., deleted: _Optional[_Iterable[str]] = ...) -> None: ...

class PutRouteRequest(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: _route_pb2.Route
    def __init__(self, route: _Optional[_Union[_route_pb2.Route, _Mapping]] = ...) -> None: ...

class PutRouteResponse(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: _route_pb2.Route
    def __init__(self, route: _Optional[_Union[_route_pb2.Route, _Mapping]] = ...) -> None: ...

class GetRouteRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRouteResponse(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: _route_pb2.Route
    def __init__(self, route: _Optional[_Union[_route_pb2.Route, _Mapping]] = ...) -> None: ...

class ListRoutesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRoutesResponse(_message.Message):
    __slots__ = ("routes", "next_page_token")
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[_route_pb2.Route]
    next_page_token: str
    def __init__(self, routes: _Optional[_Iterable[_Union[_route_pb2.Route, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PromoteVersionRequest(_message.Message):
    __slots__ = ("policy", "policy_version", "backend")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    policy: str
    policy_version: int
    backend: str
    def __init__(self, policy: _Optional[str] = ..., policy_version: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class PromoteVersionResponse(_message.Message):
    __slots__ = ("routes", "replaced_version")
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    REPLACED_VERSION_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[_route_pb2.Route]
    replaced_version: int
    def __init__(self, routes: _Optional[_Iterable[_Union[_route_pb2.Route, _Mapping]]] = ..., replaced_version: _Optional[int] = ...) -> None: ...

class DeleteRouteRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteRouteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackRouteRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class RollbackRouteResponse(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: _route_pb2.Route
    def __init__(self, route: _Optional[_Union[_route_pb2.Route, _Mapping]] = ...) -> None: ...

class SplitTrafficRequest(_message.Message):
    __slots__ = ("name", "weights", "version_weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class VersionWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights: _containers.ScalarMap[str, int]
    version_weights: _containers.ScalarMap[int, int]
    def __init__(self, name: _Optional[str] = ..., weights: _Optional[_Mapping[str, int]] = ..., version_weights: _Optional[_Mapping[int, int]] = ...) -> None: ...

class SplitTrafficResponse(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: _route_pb2.Route
    def __init__(self, route: _Optional[_Union[_route_pb2.Route, _Mapping]] = ...) -> None: ...

class WatchRoutesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRoutesResponse(_message.Message):
    __slots__ = ("routes", "snapshot_complete", "removed")
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[_route_pb2.Route]
    snapshot_complete: bool
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, routes: _Optional[_Iterable[_Union[_route_pb2.Route, _Mapping]]] = ..., snapshot_complete: bool = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...
