from fulmen.store.v1 import resource_pb2 as _resource_pb2
from fulmen.store.v1 import run_lease_service_pb2 as _run_lease_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishResourcesRequest(_message.Message):
    __slots__ = ("resources", "request_id", "expected_latest_versions", "run_fence")
    class ExpectedLatestVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LATEST_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_FENCE_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceVersion]
    request_id: str
    expected_latest_versions: _containers.ScalarMap[str, int]
    run_fence: _run_lease_service_pb2.RunFence
    def __init__(self, resources: _Optional[_Iterable[_Union[_resource_pb2.ResourceVersion, _Mapping]]] = ..., request_id: _Optional[str] = ..., expected_latest_versions: _Optional[_Mapping[str, int]] = ..., run_fence: _Optional[_Union[_run_lease_service_pb2.RunFence, _Mapping]] = ...) -> None: ...

class PublishResourcesResponse(_message.Message):
    __slots__ = ("resources",)
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceVersion]
    def __init__(self, resources: _Optional[_Iterable[_Union[_resource_pb2.ResourceVersion, _Mapping]]] = ...) -> None: ...

class GetResourcesRequest(_message.Message):
    __slots__ = ("names", "project")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    project: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., project: _Optional[str] = ...) -> None: ...

class GetResourcesResponse(_message.Message):
    __slots__ = ("resources",)
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceVersion]
    def __init__(self, resources: _Optional[_Iterable[_Union[_resource_pb2.ResourceVersion, _Mapping]]] = ...) -> None: ...

class ReadContentRequest(_message.Message):
    __slots__ = ("name", "project", "offset_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    project: str
    offset_bytes: int
    def __init__(self, name: _Optional[str] = ..., project: _Optional[str] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class ReadContentResponse(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class ListResourceVersionsRequest(_message.Message):
    __slots__ = ("parent", "project", "kind", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    project: str
    kind: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., project: _Optional[str] = ..., kind: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListResourceVersionsResponse(_message.Message):
    __slots__ = ("resources", "next_page_token", "aliases")
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceVersion]
    next_page_token: str
    aliases: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceAlias]
    def __init__(self, resources: _Optional[_Iterable[_Union[_resource_pb2.ResourceVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., aliases: _Optional[_Iterable[_Union[_resource_pb2.ResourceAlias, _Mapping]]] = ...) -> None: ...

class DiffResourcesRequest(_message.Message):
    __slots__ = ("base", "target", "project")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    base: str
    target: str
    project: str
    def __init__(self, base: _Optional[str] = ..., target: _Optional[str] = ..., project: _Optional[str] = ...) -> None: ...

class DiffResourcesResponse(_message.Message):
    __slots__ = ("unified_diff", "base", "target", "equal", "truncated")
    UNIFIED_DIFF_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EQUAL_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    unified_diff: str
    base: _resource_pb2.ResourceVersion
    target: _resource_pb2.ResourceVersion
    equal: bool
    truncated: bool
    def __init__(self, unified_diff: _Optional[str] = ..., base: _Optional[_Union[_resource_pb2.ResourceVersion, _Mapping]] = ..., target: _Optional[_Union[_resource_pb2.ResourceVersion, _Mapping]] = ..., equal: bool = ..., truncated: bool = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("name", "version", "etag", "project", "run_fence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    RUN_FENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    etag: str
    project: str
    run_fence: _run_lease_service_pb2.RunFence
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., etag: _Optional[str] = ..., project: _Optional[str] = ..., run_fence: _Optional[_Union[_run_lease_service_pb2.RunFence, _Mapping]] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: _resource_pb2.ResourceAlias
    def __init__(self, alias: _Optional[_Union[_resource_pb2.ResourceAlias, _Mapping]] = ...) -> None: ...

class WatchResourcesRequest(_message.Message):
    __slots__ = ("project", "kinds", "id_prefix", "cursor")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    project: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    id_prefix: str
    cursor: str
    def __init__(self, project: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., id_prefix: _Optional[str] = ..., cursor: _Optional[str] = ...) -> None: ...

class WatchResourcesResponse(_message.Message):
    __slots__ = ("resources", "aliases", "snapshot_complete", "cursor")
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    resources: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceVersion]
    aliases: _containers.RepeatedCompositeFieldContainer[_resource_pb2.ResourceAlias]
    snapshot_complete: bool
    cursor: str
    def __init__(self, resources: _Optional[_Iterable[_Union[_resource_pb2.ResourceVersion, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[_resource_pb2.ResourceAlias, _Mapping]]] = ..., snapshot_complete: bool = ..., cursor: _Optional[str] = ...) -> None: ...
