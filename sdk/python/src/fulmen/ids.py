"""Resource names and identifiers: made and taken apart here and nowhere else."""

import hashlib
import os
import re
import time
import uuid
from dataclasses import dataclass

from fulmen.errors import ArgumentInvalid, Violation

DEFAULT_PROJECT = "projects/default"
# Of the low 80 bits of a UUID version 7: all but those of version and variant.
_RANDOM_BITS = (1 << 80) - 1 & ~(0xF << 76) & ~(0b11 << 62)
# What a token is bound to that reaches every project.
ALL_PROJECTS = "projects/*"

_ATTEMPT = re.compile(r"rollouts/([0-9a-f-]{36})/attempts/([1-9][0-9]{0,8})")
_ROLLOUT = re.compile(r"rollouts/([0-9a-f-]{36})")
_RUNNER = "runners/"


def uuid7(unix_ms: int | None = None) -> uuid.UUID:
    """Makes a UUID version 7: 48 bits of Unix time in milliseconds, then random bits (RFC 9562, 5.7)."""
    return uuid7s(1, unix_ms)[0]


def uuid7s(count: int, unix_ms: int | None = None) -> list[uuid.UUID]:
    """Makes many UUIDs version 7 of one moment; their order is that of their random bits."""
    if unix_ms is None:
        unix_ms = time.time_ns() // 1_000_000
    head = (unix_ms & (1 << 48) - 1) << 80 | 7 << 76 | 0b10 << 62
    random = os.urandom(10 * count)
    parts = (int.from_bytes(random[start : start + 10]) for start in range(0, 10 * count, 10))
    return [uuid.UUID(int=head | part & _RANDOM_BITS) for part in parts]


def uuid7_unix_ms(value: uuid.UUID) -> int:
    """Returns the Unix time in milliseconds inside a UUID version 7."""
    return value.int >> 80


def rollout_name(rollout_id: uuid.UUID | str) -> str:
    """Formats `rollouts/{uuid}`."""
    return f"rollouts/{rollout_id}"


def attempt_name(rollout_id: uuid.UUID | str, number: int) -> str:
    """Formats `rollouts/{uuid}/attempts/{number}`."""
    return f"rollouts/{rollout_id}/attempts/{number}"


def parse_rollout_name(name: str, *, field: str = "name") -> uuid.UUID:
    """Takes the id out of `rollouts/{uuid}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _ROLLOUT.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "rollouts/{uuid}")
    return _uuid(match[1], field, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptName:
    """A parsed attempt name."""

    rollout_id: uuid.UUID
    number: int

    def __str__(self) -> str:
        return attempt_name(self.rollout_id, self.number)


def parse_attempt_name(name: str, *, field: str = "attempt") -> AttemptName:
    """Takes `rollouts/{uuid}/attempts/{number}` apart.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _ATTEMPT.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "rollouts/{uuid}/attempts/{number}")
    return AttemptName(rollout_id=_uuid(match[1], field, name), number=int(match[2]))


def runner_name(session_id: uuid.UUID | str) -> str:
    """Formats `runners/{uuid}`, the name of a runner session."""
    return f"{_RUNNER}{session_id}"


def parse_runner_name(name: str, *, field: str = "runner") -> uuid.UUID:
    """Returns the id in `runners/{uuid}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    if not name.startswith(_RUNNER):
        raise _malformed(field, name, "runners/{uuid}")
    return _uuid(name[len(_RUNNER) :], field, name)


def trace_id_of(name: str) -> str:
    """Returns the trace of a rollout, named by itself or by an attempt: the UUID's 32 hexadecimal digits."""
    return name[len("rollouts/") :][:36].replace("-", "")


def span_id_of(name: str) -> str:
    """Returns the span that stands for a rollout or an attempt as a whole: 16 hexadecimal digits of its name's SHA-256."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _uuid(text: str, field: str, name: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise _malformed(field, name, "a UUID") from None


def _malformed(field: str, name: str, form: str) -> ArgumentInvalid:
    return ArgumentInvalid(
        "The request is malformed.",
        violations=[Violation(field=field, description=f"{name[:80]!r} is not of the form {form}")],
    )
