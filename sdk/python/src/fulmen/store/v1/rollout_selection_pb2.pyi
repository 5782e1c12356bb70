from fulmen.store.v1 import failure_pb2 as _failure_pb2
from fulmen.store.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CountRolloutsRequest(_message.Message):
    __slots__ = ("project", "training_run", "states", "filter", "facets", "time_limit")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    FACETS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    project: str
    training_run: str
    states: _containers.RepeatedScalarFieldContainer[_rollout_pb2.RolloutState]
    filter: str
    facets: _containers.RepeatedScalarFieldContainer[str]
    time_limit: _duration_pb2.Duration
    def __init__(self, project: _Optional[str] = ..., training_run: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_rollout_pb2.RolloutState, str]]] = ..., filter: _Optional[str] = ..., facets: _Optional[_Iterable[str]] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CountRolloutsResponse(_message.Message):
    __slots__ = ("count", "has_more", "parts", "facets")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FACETS_FIELD_NUMBER: _ClassVar[int]
    count: int
    has_more: bool
    parts: _containers.RepeatedCompositeFieldContainer[RolloutCount]
    facets: _containers.RepeatedCompositeFieldContainer[RolloutFacet]
    def __init__(self, count: _Optional[int] = ..., has_more: bool = ..., parts: _Optional[_Iterable[_Union[RolloutCount, _Mapping]]] = ..., facets: _Optional[_Iterable[_Union[RolloutFacet, _Mapping]]] = ...) -> None: ...

class RolloutFacet(_message.Message):
    __slots__ = ("field", "values", "has_more_values", "examined_count", "has_more")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_VALUES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    field: str
    values: _containers.RepeatedCompositeFieldContainer[RolloutFacetValue]
    has_more_values: bool
    examined_count: int
    has_more: bool
    def __init__(self, field: _Optional[str] = ..., values: _Optional[_Iterable[_Union[RolloutFacetValue, _Mapping]]] = ..., has_more_values: bool = ..., examined_count: _Optional[int] = ..., has_more: bool = ...) -> None: ...

class RolloutFacetValue(_message.Message):
    __slots__ = ("value", "filter", "count")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    value: str
    filter: str
    count: int
    def __init__(self, value: _Optional[str] = ..., filter: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class RolloutCount(_message.Message):
    __slots__ = ("state", "failure_kind", "count")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    state: _rollout_pb2.RolloutState
    failure_kind: _failure_pb2.FailureKind
    count: int
    def __init__(self, state: _Optional[_Union[_rollout_pb2.RolloutState, str]] = ..., failure_kind: _Optional[_Union[_failure_pb2.FailureKind, str]] = ..., count: _Optional[int] = ...) -> None: ...

class UpdateRolloutRequest(_message.Message):
    __slots__ = ("rollout", "update_mask")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateRolloutResponse(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class DeleteRolloutsRequest(_message.Message):
    __slots__ = ("names", "filter", "project", "training_run", "page_token")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RUN_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    filter: str
    project: str
    training_run: str
    page_token: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., filter: _Optional[str] = ..., project: _Optional[str] = ..., training_run: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class DeleteRolloutsResponse(_message.Message):
    __slots__ = ("deleted_count", "kept_count", "next_page_token")
    DELETED_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    deleted_count: int
    kept_count: int
    next_page_token: str
    def __init__(self, deleted_count: _Optional[int] = ..., kept_count: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...
