from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Isolation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ISOLATION_UNSPECIFIED: _ClassVar[Isolation]
    ISOLATION_TRUSTED: _ClassVar[Isolation]
    ISOLATION_PROCESS: _ClassVar[Isolation]
    ISOLATION_SANDBOX: _ClassVar[Isolation]
ISOLATION_UNSPECIFIED: Isolation
ISOLATION_TRUSTED: Isolation
ISOLATION_PROCESS: Isolation
ISOLATION_SANDBOX: Isolation

class AgentSpec(_message.Message):
    __slots__ = ("bundle", "python", "command", "container", "job", "grader", "environment", "limits", "secrets", "virtual_environment")
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
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    bundle: str
    python: PythonEntry
    command: CommandEntry
    container: ContainerEntry
    job: JobEntry
    grader: Grader
    environment: _containers.ScalarMap[str, str]
    limits: Limits
    secrets: _containers.RepeatedScalarFieldContainer[str]
    virtual_environment: VirtualEnvironment
    def __init__(self, bundle: _Optional[str] = ..., python: _Optional[_Union[PythonEntry, _Mapping]] = ..., command: _Optional[_Union[CommandEntry, _Mapping]] = ..., container: _Optional[_Union[ContainerEntry, _Mapping]] = ..., job: _Optional[_Union[JobEntry, _Mapping]] = ..., grader: _Optional[_Union[Grader, _Mapping]] = ..., environment: _Optional[_Mapping[str, str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., secrets: _Optional[_Iterable[str]] = ..., virtual_environment: _Optional[_Union[VirtualEnvironment, _Mapping]] = ...) -> None: ...

class VirtualEnvironment(_message.Message):
    __slots__ = ("requirements", "folder")
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    requirements: str
    folder: str
    def __init__(self, requirements: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("memory_bytes", "cpu_count", "process_count")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    cpu_count: float
    process_count: int
    def __init__(self, memory_bytes: _Optional[int] = ..., cpu_count: _Optional[float] = ..., process_count: _Optional[int] = ...) -> None: ...

class PythonEntry(_message.Message):
    __slots__ = ("target", "isolation")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    target: str
    isolation: Isolation
    def __init__(self, target: _Optional[str] = ..., isolation: _Optional[_Union[Isolation, str]] = ...) -> None: ...

class CommandEntry(_message.Message):
    __slots__ = ("argv", "max_output_bytes", "isolation")
    ARGV_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    max_output_bytes: int
    isolation: Isolation
    def __init__(self, argv: _Optional[_Iterable[str]] = ..., max_output_bytes: _Optional[int] = ..., isolation: _Optional[_Union[Isolation, str]] = ...) -> None: ...

class ContainerEntry(_message.Message):
    __slots__ = ("image", "argv", "max_output_bytes", "network")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    image: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    max_output_bytes: int
    network: str
    def __init__(self, image: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., max_output_bytes: _Optional[int] = ..., network: _Optional[str] = ...) -> None: ...

class JobEntry(_message.Message):
    __slots__ = ("template", "max_output_bytes")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    template: str
    max_output_bytes: int
    def __init__(self, template: _Optional[str] = ..., max_output_bytes: _Optional[int] = ...) -> None: ...

class Grader(_message.Message):
    __slots__ = ("python", "command", "judge")
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    python: PythonEntry
    command: CommandEntry
    judge: JudgeEntry
    def __init__(self, python: _Optional[_Union[PythonEntry, _Mapping]] = ..., command: _Optional[_Union[CommandEntry, _Mapping]] = ..., judge: _Optional[_Union[JudgeEntry, _Mapping]] = ...) -> None: ...

class JudgeEntry(_message.Message):
    __slots__ = ("model", "prompt", "dimensions", "min_score", "max_score", "sample_count")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MIN_SCORE_FIELD_NUMBER: _ClassVar[int]
    MAX_SCORE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    dimensions: _containers.RepeatedScalarFieldContainer[str]
    min_score: float
    max_score: float
    sample_count: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., dimensions: _Optional[_Iterable[str]] = ..., min_score: _Optional[float] = ..., max_score: _Optional[float] = ..., sample_count: _Optional[int] = ...) -> None: ...
