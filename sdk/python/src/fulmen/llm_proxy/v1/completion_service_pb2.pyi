from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CompleteRequest(_message.Message):
    __slots__ = ("path", "body_json", "agent_name", "project", "conversation")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    path: str
    body_json: bytes
    agent_name: str
    project: str
    conversation: str
    def __init__(self, path: _Optional[str] = ..., body_json: _Optional[bytes] = ..., agent_name: _Optional[str] = ..., project: _Optional[str] = ..., conversation: _Optional[str] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("http_status", "body_json", "retry_after_seconds")
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    http_status: int
    body_json: bytes
    retry_after_seconds: float
    def __init__(self, http_status: _Optional[int] = ..., body_json: _Optional[bytes] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class StreamCompleteRequest(_message.Message):
    __slots__ = ("path", "body_json", "agent_name", "project", "conversation")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    path: str
    body_json: bytes
    agent_name: str
    project: str
    conversation: str
    def __init__(self, path: _Optional[str] = ..., body_json: _Optional[bytes] = ..., agent_name: _Optional[str] = ..., project: _Optional[str] = ..., conversation: _Optional[str] = ...) -> None: ...

class StreamCompleteResponse(_message.Message):
    __slots__ = ("event_json", "event_name", "http_status", "retry_after_seconds")
    EVENT_JSON_FIELD_NUMBER: _ClassVar[int]
    EVENT_NAME_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    event_json: bytes
    event_name: str
    http_status: int
    retry_after_seconds: float
    def __init__(self, event_json: _Optional[bytes] = ..., event_name: _Optional[str] = ..., http_status: _Optional[int] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...
