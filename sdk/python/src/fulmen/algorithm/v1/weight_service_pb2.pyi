from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_FORM_UNSPECIFIED: _ClassVar[WeightForm]
    WEIGHT_FORM_FULL: _ClassVar[WeightForm]
    WEIGHT_FORM_ADAPTERS: _ClassVar[WeightForm]
    WEIGHT_FORM_DELTA: _ClassVar[WeightForm]
    WEIGHT_FORM_BASE: _ClassVar[WeightForm]
WEIGHT_FORM_UNSPECIFIED: WeightForm
WEIGHT_FORM_FULL: WeightForm
WEIGHT_FORM_ADAPTERS: WeightForm
WEIGHT_FORM_DELTA: WeightForm
WEIGHT_FORM_BASE: WeightForm

class WeightFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "aliases", "size_bytes", "file_count", "create_time", "use_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    USE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    size_bytes: int
    file_count: int
    create_time: _timestamp_pb2.Timestamp
    use_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., size_bytes: _Optional[int] = ..., file_count: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., use_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class BeginUploadRequest(_message.Message):
    __slots__ = ("project", "files", "alias")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    project: str
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    alias: str
    def __init__(self, project: _Optional[str] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., alias: _Optional[str] = ...) -> None: ...

class FileProgress(_message.Message):
    __slots__ = ("path", "received_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    received_bytes: int
    def __init__(self, path: _Optional[str] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class BeginUploadResponse(_message.Message):
    __slots__ = ("upload", "missing", "model", "expire_time")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    upload: str
    missing: _containers.RepeatedCompositeFieldContainer[FileProgress]
    model: Model
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, upload: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[FileProgress, _Mapping]]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class UploadChunksRequest(_message.Message):
    __slots__ = ("upload", "path", "offset", "data")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    upload: str
    path: str
    offset: int
    data: bytes
    def __init__(self, upload: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadChunksResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class CommitUploadRequest(_message.Message):
    __slots__ = ("upload", "alias")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    upload: str
    alias: str
    def __init__(self, upload: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class CommitUploadResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("project", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightSource(_message.Message):
    __slots__ = ("model", "policy_version", "project", "form")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    model: str
    policy_version: str
    project: str
    form: WeightForm
    def __init__(self, model: _Optional[str] = ..., policy_version: _Optional[str] = ..., project: _Optional[str] = ..., form: _Optional[_Union[WeightForm, str]] = ...) -> None: ...

class GetWeightsRequest(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: WeightSource
    def __init__(self, source: _Optional[_Union[WeightSource, _Mapping]] = ...) -> None: ...

class GetWeightsResponse(_message.Message):
    __slots__ = ("source", "digest", "files")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    source: WeightSource
    digest: str
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    def __init__(self, source: _Optional[_Union[WeightSource, _Mapping]] = ..., digest: _Optional[str] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ...) -> None: ...

class DownloadChunksRequest(_message.Message):
    __slots__ = ("source", "path", "offset", "size_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: WeightSource
    path: str
    offset: int
    size_bytes: int
    def __init__(self, source: _Optional[_Union[WeightSource, _Mapping]] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DownloadChunksResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
