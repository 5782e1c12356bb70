from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NotifyRequest(_message.Message):
    __slots__ = ("ready_projects", "finished_projects", "resource_projects", "projects_changed", "cancels", "ordered_runners")
    READY_PROJECTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_PROJECTS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_PROJECTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    ORDERED_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    ready_projects: _containers.RepeatedScalarFieldContainer[int]
    finished_projects: _containers.RepeatedScalarFieldContainer[int]
    resource_projects: _containers.RepeatedScalarFieldContainer[int]
    projects_changed: bool
    cancels: _containers.RepeatedCompositeFieldContainer[CancelHint]
    ordered_runners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ready_projects: _Optional[_Iterable[int]] = ..., finished_projects: _Optional[_Iterable[int]] = ..., resource_projects: _Optional[_Iterable[int]] = ..., projects_changed: bool = ..., cancels: _Optional[_Iterable[_Union[CancelHint, _Mapping]]] = ..., ordered_runners: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelHint(_message.Message):
    __slots__ = ("runner", "attempt")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    runner: str
    attempt: str
    def __init__(self, runner: _Optional[str] = ..., attempt: _Optional[str] = ...) -> None: ...

class NotifyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
