from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordedCall(_message.Message):
    __slots__ = ("name", "conversation", "model", "backend", "policy", "policy_version", "http_status", "error", "finish_reason", "create_time", "duration", "prompt_token_count", "cached_token_count", "completion_token_count", "cost_micros", "message_count", "content", "expire_time", "score", "label")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COST_MICROS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    conversation: str
    model: str
    backend: str
    policy: str
    policy_version: int
    http_status: int
    error: str
    finish_reason: str
    create_time: _timestamp_pb2.Timestamp
    duration: _duration_pb2.Duration
    prompt_token_count: int
    cached_token_count: int
    completion_token_count: int
    cost_micros: int
    message_count: int
    content: CallContent
    expire_time: _timestamp_pb2.Timestamp
    score: float
    label: str
    def __init__(self, name: _Optional[str] = ..., conversation: _Optional[str] = ..., model: _Optional[str] = ..., backend: _Optional[str] = ..., policy: _Optional[str] = ..., policy_version: _Optional[int] = ..., http_status: _Optional[int] = ..., error: _Optional[str] = ..., finish_reason: _Optional[str] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., cost_micros: _Optional[int] = ..., message_count: _Optional[int] = ..., content: _Optional[_Union[CallContent, _Mapping]] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., score: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...

class CallContent(_message.Message):
    __slots__ = ("messages_json", "tools_json", "answer_json")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_JSON_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    tools_json: bytes
    answer_json: bytes
    def __init__(self, messages_json: _Optional[bytes] = ..., tools_json: _Optional[bytes] = ..., answer_json: _Optional[bytes] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("name", "model", "call_count", "create_time", "update_time", "score", "label")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    call_count: int
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    score: float
    label: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., call_count: _Optional[int] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., score: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...
