from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentSpec(_message.Message):
    __slots__ = ("bundle", "python", "command", "grader", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    bundle: str
    python: PythonEntry
    command: CommandEntry
    grader: Grader
    environment: _containers.ScalarMap[str, str]
    def __init__(self, bundle: _Optional[str] = ..., python: _Optional[_Union[PythonEntry, _Mapping]] = ..., command: _Optional[_Union[CommandEntry, _Mapping]] = ..., grader: _Optional[_Union[Grader, _Mapping]] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PythonEntry(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class CommandEntry(_message.Message):
    __slots__ = ("argv", "max_output_bytes")
    ARGV_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    max_output_bytes: int
    def __init__(self, argv: _Optional[_Iterable[str]] = ..., max_output_bytes: _Optional[int] = ...) -> None: ...

class Grader(_message.Message):
    __slots__ = ("python", "command")
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    python: PythonEntry
    command: CommandEntry
    def __init__(self, python: _Optional[_Union[PythonEntry, _Mapping]] = ..., command: _Optional[_Union[CommandEntry, _Mapping]] = ...) -> None: ...
