from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CompleteRequest(_message.Message):
    __slots__ = ("path", "body_json")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    path: str
    body_json: bytes
    def __init__(self, path: _Optional[str] = ..., body_json: _Optional[bytes] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("http_status", "body_json")
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    http_status: int
    body_json: bytes
    def __init__(self, http_status: _Optional[int] = ..., body_json: _Optional[bytes] = ...) -> None: ...

class StreamCompleteRequest(_message.Message):
    __slots__ = ("path", "body_json")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    path: str
    body_json: bytes
    def __init__(self, path: _Optional[str] = ..., body_json: _Optional[bytes] = ...) -> None: ...

class StreamCompleteResponse(_message.Message):
    __slots__ = ("event_json",)
    EVENT_JSON_FIELD_NUMBER: _ClassVar[int]
    event_json: bytes
    def __init__(self, event_json: _Optional[bytes] = ...) -> None: ...
