from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeasurementLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASUREMENT_LEVEL_UNSPECIFIED: _ClassVar[MeasurementLevel]
    MEASUREMENT_LEVEL_NOMINAL: _ClassVar[MeasurementLevel]
    MEASUREMENT_LEVEL_ORDINAL: _ClassVar[MeasurementLevel]
    MEASUREMENT_LEVEL_INTERVAL: _ClassVar[MeasurementLevel]
MEASUREMENT_LEVEL_UNSPECIFIED: MeasurementLevel
MEASUREMENT_LEVEL_NOMINAL: MeasurementLevel
MEASUREMENT_LEVEL_ORDINAL: MeasurementLevel
MEASUREMENT_LEVEL_INTERVAL: MeasurementLevel

class Annotation(_message.Message):
    __slots__ = ("name", "rollout", "dimension", "value", "comment", "author", "create_time", "update_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    COMMENT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    rollout: str
    dimension: str
    value: float
    comment: str
    author: str
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., rollout: _Optional[str] = ..., dimension: _Optional[str] = ..., value: _Optional[float] = ..., comment: _Optional[str] = ..., author: _Optional[str] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateAnnotationRequest(_message.Message):
    __slots__ = ("annotation",)
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    annotation: Annotation
    def __init__(self, annotation: _Optional[_Union[Annotation, _Mapping]] = ...) -> None: ...

class CreateAnnotationResponse(_message.Message):
    __slots__ = ("annotation",)
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    annotation: Annotation
    def __init__(self, annotation: _Optional[_Union[Annotation, _Mapping]] = ...) -> None: ...

class UpdateAnnotationRequest(_message.Message):
    __slots__ = ("annotation",)
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    annotation: Annotation
    def __init__(self, annotation: _Optional[_Union[Annotation, _Mapping]] = ...) -> None: ...

class UpdateAnnotationResponse(_message.Message):
    __slots__ = ("annotation",)
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    annotation: Annotation
    def __init__(self, annotation: _Optional[_Union[Annotation, _Mapping]] = ...) -> None: ...

class DeleteAnnotationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteAnnotationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAnnotationsRequest(_message.Message):
    __slots__ = ("project", "rollout", "author", "dimension", "page_size", "page_token")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    project: str
    rollout: str
    author: str
    dimension: str
    page_size: int
    page_token: str
    def __init__(self, project: _Optional[str] = ..., rollout: _Optional[str] = ..., author: _Optional[str] = ..., dimension: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAnnotationsResponse(_message.Message):
    __slots__ = ("annotations", "next_page_token")
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    annotations: _containers.RepeatedCompositeFieldContainer[Annotation]
    next_page_token: str
    def __init__(self, annotations: _Optional[_Iterable[_Union[Annotation, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetAgreementRequest(_message.Message):
    __slots__ = ("project", "dimension", "level")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    project: str
    dimension: str
    level: MeasurementLevel
    def __init__(self, project: _Optional[str] = ..., dimension: _Optional[str] = ..., level: _Optional[_Union[MeasurementLevel, str]] = ...) -> None: ...

class GetAgreementResponse(_message.Message):
    __slots__ = ("alpha", "rollout_count", "authors", "pairs", "truncated")
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AUTHORS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    alpha: float
    rollout_count: int
    authors: _containers.RepeatedCompositeFieldContainer[AuthorScores]
    pairs: _containers.RepeatedCompositeFieldContainer[AuthorPair]
    truncated: bool
    def __init__(self, alpha: _Optional[float] = ..., rollout_count: _Optional[int] = ..., authors: _Optional[_Iterable[_Union[AuthorScores, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[AuthorPair, _Mapping]]] = ..., truncated: bool = ...) -> None: ...

class AuthorScores(_message.Message):
    __slots__ = ("author", "annotation_count", "mean")
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    author: str
    annotation_count: int
    mean: float
    def __init__(self, author: _Optional[str] = ..., annotation_count: _Optional[int] = ..., mean: _Optional[float] = ...) -> None: ...

class AuthorPair(_message.Message):
    __slots__ = ("author", "other_author", "rollout_count", "equal_share", "kappa")
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    OTHER_AUTHOR_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    EQUAL_SHARE_FIELD_NUMBER: _ClassVar[int]
    KAPPA_FIELD_NUMBER: _ClassVar[int]
    author: str
    other_author: str
    rollout_count: int
    equal_share: float
    kappa: float
    def __init__(self, author: _Optional[str] = ..., other_author: _Optional[str] = ..., rollout_count: _Optional[int] = ..., equal_share: _Optional[float] = ..., kappa: _Optional[float] = ...) -> None: ...
