from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelCallRecord(_message.Message):
    __slots__ = ("model", "policy", "prompt_token_ids", "completion_token_ids", "completion_logprobs", "policy_versions", "finish_reason", "usable", "unusable_reason", "temperature", "request_json", "response_json", "agent_name", "completion_token_text", "completion_token_sizes", "routed_experts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_JSON_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_SIZES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    policy: str
    prompt_token_ids: bytes
    completion_token_ids: bytes
    completion_logprobs: bytes
    policy_versions: _containers.RepeatedCompositeFieldContainer[PolicyVersionRange]
    finish_reason: str
    usable: bool
    unusable_reason: str
    temperature: float
    request_json: bytes
    response_json: bytes
    agent_name: str
    completion_token_text: bytes
    completion_token_sizes: _containers.RepeatedScalarFieldContainer[int]
    routed_experts: RoutedExperts
    def __init__(self, model: _Optional[str] = ..., policy: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., completion_token_ids: _Optional[bytes] = ..., completion_logprobs: _Optional[bytes] = ..., policy_versions: _Optional[_Iterable[_Union[PolicyVersionRange, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., usable: bool = ..., unusable_reason: _Optional[str] = ..., temperature: _Optional[float] = ..., request_json: _Optional[bytes] = ..., response_json: _Optional[bytes] = ..., agent_name: _Optional[str] = ..., completion_token_text: _Optional[bytes] = ..., completion_token_sizes: _Optional[_Iterable[int]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("layers", "top_k", "entry_bytes", "first_token", "experts")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ENTRY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    top_k: int
    entry_bytes: int
    first_token: int
    experts: bytes
    def __init__(self, layers: _Optional[int] = ..., top_k: _Optional[int] = ..., entry_bytes: _Optional[int] = ..., first_token: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class PolicyVersionRange(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
