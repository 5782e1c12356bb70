from fulmen.llm_proxy.v1 import backend_pb2 as _backend_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterBackendRequest(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class RegisterBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class ListBackendsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBackendsResponse(_message.Message):
    __slots__ = ("backends", "next_page_token")
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    backends: _containers.RepeatedCompositeFieldContainer[_backend_pb2.Backend]
    next_page_token: str
    def __init__(self, backends: _Optional[_Iterable[_Union[_backend_pb2.Backend, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DrainBackendRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class ResumeBackendRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class HoldBackendRequest(_message.Message):
    __slots__ = ("name", "ttl")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HoldBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class ReleaseBackendRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReleaseBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: _backend_pb2.Backend
    def __init__(self, backend: _Optional[_Union[_backend_pb2.Backend, _Mapping]] = ...) -> None: ...

class DeleteBackendRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteBackendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBackendHealthRequest(_message.Message):
    __slots__ = ("this_process_only",)
    THIS_PROCESS_ONLY_FIELD_NUMBER: _ClassVar[int]
    this_process_only: bool
    def __init__(self, this_process_only: bool = ...) -> None: ...

class GetBackendHealthResponse(_message.Message):
    __slots__ = ("backends", "instance_id")
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    backends: _containers.RepeatedCompositeFieldContainer[_backend_pb2.BackendHealth]
    instance_id: str
    def __init__(self, backends: _Optional[_Iterable[_Union[_backend_pb2.BackendHealth, _Mapping]]] = ..., instance_id: _Optional[str] = ...) -> None: ...
