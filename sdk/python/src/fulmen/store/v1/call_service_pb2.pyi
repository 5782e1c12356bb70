from fulmen.store.v1 import call_pb2 as _call_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NewCall(_message.Message):
    __slots__ = ("call", "end_hash", "prefix_hashes", "retention")
    CALL_FIELD_NUMBER: _ClassVar[int]
    END_HASH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    call: _call_pb2.RecordedCall
    end_hash: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    retention: _duration_pb2.Duration
    def __init__(self, call: _Optional[_Union[_call_pb2.RecordedCall, _Mapping]] = ..., end_hash: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., retention: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RecordCallsRequest(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[NewCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[NewCall, _Mapping]]] = ...) -> None: ...

class RecordCallsResponse(_message.Message):
    __slots__ = ("rejected_count",)
    REJECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    rejected_count: int
    def __init__(self, rejected_count: _Optional[int] = ...) -> None: ...

class ListCallsRequest(_message.Message):
    __slots__ = ("project", "filter", "with_content", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    WITH_CONTENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    filter: str
    with_content: bool
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., filter: _Optional[str] = ..., with_content: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCallsResponse(_message.Message):
    __slots__ = ("calls", "next_page_token")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[_call_pb2.RecordedCall]
    next_page_token: str
    def __init__(self, calls: _Optional[_Iterable[_Union[_call_pb2.RecordedCall, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetCallRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetCallResponse(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: _call_pb2.RecordedCall
    def __init__(self, call: _Optional[_Union[_call_pb2.RecordedCall, _Mapping]] = ...) -> None: ...

class ListConversationsRequest(_message.Message):
    __slots__ = ("project", "filter", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    filter: str
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., filter: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListConversationsResponse(_message.Message):
    __slots__ = ("conversations", "next_page_token")
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[_call_pb2.Conversation]
    next_page_token: str
    def __init__(self, conversations: _Optional[_Iterable[_Union[_call_pb2.Conversation, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteConversationsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteConversationsResponse(_message.Message):
    __slots__ = ("deleted_call_count",)
    DELETED_CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    deleted_call_count: int
    def __init__(self, deleted_call_count: _Optional[int] = ...) -> None: ...

class RateConversationRequest(_message.Message):
    __slots__ = ("name", "score", "label")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    score: float
    label: str
    def __init__(self, name: _Optional[str] = ..., score: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...

class RateConversationResponse(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: _call_pb2.Conversation
    def __init__(self, conversation: _Optional[_Union[_call_pb2.Conversation, _Mapping]] = ...) -> None: ...
