from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BudgetPeriod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUDGET_PERIOD_UNSPECIFIED: _ClassVar[BudgetPeriod]
    BUDGET_PERIOD_DAY: _ClassVar[BudgetPeriod]
    BUDGET_PERIOD_MONTH: _ClassVar[BudgetPeriod]
BUDGET_PERIOD_UNSPECIFIED: BudgetPeriod
BUDGET_PERIOD_DAY: BudgetPeriod
BUDGET_PERIOD_MONTH: BudgetPeriod

class ModelLimits(_message.Message):
    __slots__ = ("project", "attempt", "attempt_token_budget", "budgets")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    project: CallLimits
    attempt: CallLimits
    attempt_token_budget: int
    budgets: _containers.RepeatedCompositeFieldContainer[SpendBudget]
    def __init__(self, project: _Optional[_Union[CallLimits, _Mapping]] = ..., attempt: _Optional[_Union[CallLimits, _Mapping]] = ..., attempt_token_budget: _Optional[int] = ..., budgets: _Optional[_Iterable[_Union[SpendBudget, _Mapping]]] = ...) -> None: ...

class SpendBudget(_message.Message):
    __slots__ = ("subject", "limit_micros", "period", "spent_micros")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MICROS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    SPENT_MICROS_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit_micros: int
    period: BudgetPeriod
    spent_micros: int
    def __init__(self, subject: _Optional[str] = ..., limit_micros: _Optional[int] = ..., period: _Optional[_Union[BudgetPeriod, str]] = ..., spent_micros: _Optional[int] = ...) -> None: ...

class CallLimits(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "concurrent_calls")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_CALLS_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    tokens_per_minute: int
    concurrent_calls: int
    def __init__(self, requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent_calls: _Optional[int] = ...) -> None: ...
