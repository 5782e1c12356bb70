from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EffectState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EFFECT_STATE_UNSPECIFIED: _ClassVar[EffectState]
    EFFECT_STATE_BEGUN: _ClassVar[EffectState]
    EFFECT_STATE_DONE: _ClassVar[EffectState]
    EFFECT_STATE_UNKNOWN: _ClassVar[EffectState]
EFFECT_STATE_UNSPECIFIED: EffectState
EFFECT_STATE_BEGUN: EffectState
EFFECT_STATE_DONE: EffectState
EFFECT_STATE_UNKNOWN: EffectState

class Effect(_message.Message):
    __slots__ = ("name", "key", "state", "result_json", "attempt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    state: EffectState
    result_json: bytes
    attempt: str
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., state: _Optional[_Union[EffectState, str]] = ..., result_json: _Optional[bytes] = ..., attempt: _Optional[str] = ...) -> None: ...

class BeginEffectRequest(_message.Message):
    __slots__ = ("attempt", "name", "key", "token")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    name: str
    key: str
    token: str
    def __init__(self, attempt: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class BeginEffectResponse(_message.Message):
    __slots__ = ("effect",)
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    effect: Effect
    def __init__(self, effect: _Optional[_Union[Effect, _Mapping]] = ...) -> None: ...

class EndEffectRequest(_message.Message):
    __slots__ = ("attempt", "name", "key", "token", "result_json")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    name: str
    key: str
    token: str
    result_json: bytes
    def __init__(self, attempt: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ..., token: _Optional[str] = ..., result_json: _Optional[bytes] = ...) -> None: ...

class EndEffectResponse(_message.Message):
    __slots__ = ("effect",)
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    effect: Effect
    def __init__(self, effect: _Optional[_Union[Effect, _Mapping]] = ...) -> None: ...
