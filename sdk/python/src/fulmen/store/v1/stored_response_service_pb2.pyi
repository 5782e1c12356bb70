from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoredResponse(_message.Message):
    __slots__ = ("id", "previous_id", "input_json", "response_json", "depth", "chain_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_JSON_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    CHAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    previous_id: str
    input_json: bytes
    response_json: bytes
    depth: int
    chain_bytes: int
    def __init__(self, id: _Optional[str] = ..., previous_id: _Optional[str] = ..., input_json: _Optional[bytes] = ..., response_json: _Optional[bytes] = ..., depth: _Optional[int] = ..., chain_bytes: _Optional[int] = ...) -> None: ...

class PutStoredResponseRequest(_message.Message):
    __slots__ = ("project", "attempt", "response", "expire_time")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    project: str
    attempt: str
    response: StoredResponse
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, project: _Optional[str] = ..., attempt: _Optional[str] = ..., response: _Optional[_Union[StoredResponse, _Mapping]] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PutStoredResponseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoredResponsesRequest(_message.Message):
    __slots__ = ("project", "attempt", "id", "max_count")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    project: str
    attempt: str
    id: str
    max_count: int
    def __init__(self, project: _Optional[str] = ..., attempt: _Optional[str] = ..., id: _Optional[str] = ..., max_count: _Optional[int] = ...) -> None: ...

class GetStoredResponsesResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[StoredResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[StoredResponse, _Mapping]]] = ...) -> None: ...

class DeleteStoredResponseRequest(_message.Message):
    __slots__ = ("project", "attempt", "id")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    project: str
    attempt: str
    id: str
    def __init__(self, project: _Optional[str] = ..., attempt: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class DeleteStoredResponseResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...
