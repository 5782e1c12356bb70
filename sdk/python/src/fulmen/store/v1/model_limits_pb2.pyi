from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelLimits(_message.Message):
    __slots__ = ("project", "attempt", "attempt_token_budget")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    project: CallLimits
    attempt: CallLimits
    attempt_token_budget: int
    def __init__(self, project: _Optional[_Union[CallLimits, _Mapping]] = ..., attempt: _Optional[_Union[CallLimits, _Mapping]] = ..., attempt_token_budget: _Optional[int] = ...) -> None: ...

class CallLimits(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "concurrent_calls")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_CALLS_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    tokens_per_minute: int
    concurrent_calls: int
    def __init__(self, requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent_calls: _Optional[int] = ...) -> None: ...
