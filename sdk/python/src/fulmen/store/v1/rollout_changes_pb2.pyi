from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRolloutChangesRequest(_message.Message):
    __slots__ = ("project", "training_run", "cursor")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    cursor: str
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., cursor: _Optional[str] = ...) -> None: ...

class WatchRolloutChangesResponse(_message.Message):
    __slots__ = ("rollouts", "cursor")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    cursor: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...
