"""The base of all errors: a canonical code, a reason, a message, metadata. Nothing here imports grpc."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

ERROR_DOMAIN = "fulmen.dev"


class Code(StrEnum):
    """The canonical status codes that Fulmen uses (google.rpc.Code)."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation in a request: path of the field and description."""

    field: str
    description: str


class FulmenError(Exception):
    """An error of a Fulmen service, with the details that a caller needs to handle it.

    Attributes:
        message: One or two sentences for a person; never internal text or a secret.
        metadata: Names of the objects concerned, such as `rollout`.
        violations: All problems of a malformed request.
        retry_after_s: Seconds after which the same call may succeed; None if unknown.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        violations: Iterable[Violation] = (),
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        if not self.violations:
            return self.message
        return "\n".join([self.message, *(f"  {v.field}: {v.description}" for v in self.violations)])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.violations, self.retry_after_s, self.metadata)


def _rebuild(
    cls: type[FulmenError],
    message: str,
    violations: tuple[Violation, ...],
    retry_after_s: float | None,
    metadata: dict[str, str],
) -> FulmenError:
    return cls(message, violations=violations, retry_after_s=retry_after_s, **metadata)
