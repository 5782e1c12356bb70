from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListPromptCandidatesRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPromptCandidatesResponse(_message.Message):
    __slots__ = ("candidates", "next_page_token", "search")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[PromptCandidate]
    next_page_token: str
    search: PromptSearch
    def __init__(self, candidates: _Optional[_Iterable[_Union[PromptCandidate, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., search: _Optional[_Union[PromptSearch, _Mapping]] = ...) -> None: ...

class PromptSearch(_message.Message):
    __slots__ = ("beam", "call_count", "token_count", "rollout_count", "end_reason", "rejected")
    BEAM_FIELD_NUMBER: _ClassVar[int]
    CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    beam: _containers.RepeatedScalarFieldContainer[str]
    call_count: int
    token_count: int
    rollout_count: int
    end_reason: str
    rejected: _containers.RepeatedCompositeFieldContainer[RejectedPrompt]
    def __init__(self, beam: _Optional[_Iterable[str]] = ..., call_count: _Optional[int] = ..., token_count: _Optional[int] = ..., rollout_count: _Optional[int] = ..., end_reason: _Optional[str] = ..., rejected: _Optional[_Iterable[_Union[RejectedPrompt, _Mapping]]] = ...) -> None: ...

class PromptCandidate(_message.Message):
    __slots__ = ("id", "parent", "version", "text", "critique", "round", "reward_mean", "reward_count", "validation")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CRITIQUE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    parent: str
    version: str
    text: str
    critique: str
    round: int
    reward_mean: float
    reward_count: int
    validation: float
    def __init__(self, id: _Optional[str] = ..., parent: _Optional[str] = ..., version: _Optional[str] = ..., text: _Optional[str] = ..., critique: _Optional[str] = ..., round: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_count: _Optional[int] = ..., validation: _Optional[float] = ...) -> None: ...

class RejectedPrompt(_message.Message):
    __slots__ = ("round", "parent", "reason", "text")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    round: int
    parent: str
    reason: str
    text: str
    def __init__(self, round: _Optional[int] = ..., parent: _Optional[str] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
