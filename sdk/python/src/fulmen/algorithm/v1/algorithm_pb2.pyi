from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Algorithm(_message.Message):
    __slots__ = ("name", "summary", "required_inputs", "optional_inputs", "any_of_inputs", "trains", "settings", "settings_schema_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_INPUTS_FIELD_NUMBER: _ClassVar[int]
    ANY_OF_INPUTS_FIELD_NUMBER: _ClassVar[int]
    TRAINS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    required_inputs: _containers.RepeatedScalarFieldContainer[str]
    optional_inputs: _containers.RepeatedScalarFieldContainer[str]
    any_of_inputs: _containers.RepeatedScalarFieldContainer[str]
    trains: bool
    settings: _containers.RepeatedCompositeFieldContainer[AlgorithmSetting]
    settings_schema_json: str
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., required_inputs: _Optional[_Iterable[str]] = ..., optional_inputs: _Optional[_Iterable[str]] = ..., any_of_inputs: _Optional[_Iterable[str]] = ..., trains: bool = ..., settings: _Optional[_Iterable[_Union[AlgorithmSetting, _Mapping]]] = ..., settings_schema_json: _Optional[str] = ...) -> None: ...

class AlgorithmSetting(_message.Message):
    __slots__ = ("name", "default_json", "summary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_JSON_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    default_json: str
    summary: str
    def __init__(self, name: _Optional[str] = ..., default_json: _Optional[str] = ..., summary: _Optional[str] = ...) -> None: ...
