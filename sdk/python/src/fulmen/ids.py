"""Resource names and identifiers: created and parsed only here."""

import hashlib
import os
import re
import time
import uuid
from dataclasses import dataclass

from fulmen.errors import ArgumentInvalid, Violation

DEFAULT_PROJECT = "projects/default"
# The low 80 bits of a UUID version 7, except the bits of version and variant.
_RANDOM_BITS = (1 << 80) - 1 & ~(0xF << 76) & ~(0b11 << 62)
# Project of a token that is bound to all projects.
ALL_PROJECTS = "projects/*"

NOT_DOTS = r"(?=\.*[A-Za-z0-9_-])"
"""Begins the pattern of an id that may have dots: `.` and `..` are folders in paths and URLs."""

_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ROLLOUT_PATTERN = f"(projects/[a-z0-9-]{{1,63}})/rollouts/({_UUID})"
_ROLLOUT = re.compile(_ROLLOUT_PATTERN)
_TRAINING_RUN = re.compile(rf"(projects/[a-z0-9-]{{1,63}})/trainingRuns/({NOT_DOTS}[A-Za-z0-9._-]{{1,128}})")
_ATTEMPT = re.compile(f"{_ROLLOUT_PATTERN}/attempts/([1-9][0-9]{{0,8}})")
_CALL = re.compile(f"(projects/[a-z0-9-]{{1,63}})/calls/({_UUID})")
_CONVERSATION = re.compile(r"(projects/[a-z0-9-]{1,63})/conversations/([A-Za-z0-9._:@-]{1,128})")
_ANNOTATION = re.compile(f"(projects/[a-z0-9-]{{1,63}})/annotations/({_UUID})")
_SCHEDULE = re.compile(r"(projects/[a-z0-9-]{1,63})/schedules/([a-z0-9-]{1,63})")
_TRAINING_RUN_FORM = "projects/{project}/trainingRuns/{id}"
_ROLLOUT_FORM = "projects/{project}/rollouts/{uuid}"
_ATTEMPT_FORM = "projects/{project}/rollouts/{uuid}/attempts/{number}"
_RUNNER = "runners/"

MAX_TRAINING_RUN = 214
"""Length of the longest name of a training run, characters."""


def uuid7(unix_ms: int | None = None) -> uuid.UUID:
    """Returns a UUID version 7: 48 bits of Unix time in milliseconds, then random bits (RFC 9562, 5.7)."""
    return uuid7s(1, unix_ms)[0]


def uuid7s(count: int, unix_ms: int | None = None) -> list[uuid.UUID]:
    """Returns several UUIDs version 7 with the same time; they sort by their random bits."""
    if unix_ms is None:
        unix_ms = time.time_ns() // 1_000_000
    head = (unix_ms & (1 << 48) - 1) << 80 | 7 << 76 | 0b10 << 62
    random = os.urandom(10 * count)
    parts = (int.from_bytes(random[start : start + 10]) for start in range(0, 10 * count, 10))
    return [uuid.UUID(int=head | part & _RANDOM_BITS) for part in parts]


def uuid7_unix_ms(value: uuid.UUID) -> int:
    """Returns the Unix time in milliseconds inside a UUID version 7."""
    return value.int >> 80


def rollout_name(project: str, rollout_id: uuid.UUID | str) -> str:
    """Formats `projects/{project}/rollouts/{uuid}`; `project` is `projects/{project}`."""
    return f"{project}/rollouts/{rollout_id}"


def attempt_name(project: str, rollout_id: uuid.UUID | str, number: int) -> str:
    """Formats `projects/{project}/rollouts/{uuid}/attempts/{number}`; `project` is `projects/{project}`."""
    return f"{project}/rollouts/{rollout_id}/attempts/{number}"


def attempt_of(rollout: str, number: int | str) -> str:
    """Formats the name of an attempt of the rollout named `rollout`."""
    return f"{rollout}/attempts/{number}"


def rollout_of(name: str) -> str:
    """Returns the rollout of an attempt name; a rollout name unchanged."""
    return name.partition("/attempts/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutName:
    """A parsed rollout name.

    Attributes:
        project: `projects/{project}`.
        rollout_id: Id of the rollout.
    """

    project: str
    rollout_id: uuid.UUID

    def __str__(self) -> str:
        return rollout_name(self.project, self.rollout_id)


def parse_rollout_name(name: str, *, field: str = "name") -> RolloutName:
    """Parses `projects/{project}/rollouts/{uuid}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _ROLLOUT.fullmatch(name)
    if match is None:
        raise _malformed(field, name, _ROLLOUT_FORM)
    return RolloutName(project=match[1], rollout_id=uuid.UUID(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptName:
    """A parsed attempt name.

    Attributes:
        project: `projects/{project}`.
        rollout_id: Id of the rollout.
        number: Number of the attempt, from 1.
    """

    project: str
    rollout_id: uuid.UUID
    number: int

    @property
    def rollout(self) -> str:
        """The name of its rollout."""
        return rollout_name(self.project, self.rollout_id)

    def __str__(self) -> str:
        return attempt_name(self.project, self.rollout_id, self.number)


def parse_attempt_name(name: str, *, field: str = "attempt") -> AttemptName:
    """Parses `projects/{project}/rollouts/{uuid}/attempts/{number}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _ATTEMPT.fullmatch(name)
    if match is None:
        raise _malformed(field, name, _ATTEMPT_FORM)
    return AttemptName(project=match[1], rollout_id=uuid.UUID(match[2]), number=int(match[3]))


def training_run_name(project: str, run_id: str) -> str:
    """Formats `projects/{project}/trainingRuns/{id}`; `project` is `projects/{project}`."""
    return f"{project}/trainingRuns/{run_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunName:
    """A parsed name of a training run.

    Attributes:
        project: `projects/{project}`.
        run_id: Id of the run, unique in its project.
    """

    project: str
    run_id: str


def parse_training_run_name(name: str, *, field: str = "training_run") -> TrainingRunName:
    """Parses `projects/{project}/trainingRuns/{id}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _TRAINING_RUN.fullmatch(name)
    if match is None:
        raise _malformed(field, name, _TRAINING_RUN_FORM)
    return TrainingRunName(project=match[1], run_id=match[2])


def call_name(project: str, call_id: uuid.UUID | str) -> str:
    """Formats `projects/{project}/calls/{uuid}`; `project` is `projects/{project}`."""
    return f"{project}/calls/{call_id}"


def parse_call_name(name: str, *, field: str = "name") -> tuple[str, uuid.UUID]:
    """Parses `projects/{project}/calls/{uuid}`; returns `projects/{project}` and the id.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _CALL.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "projects/{project}/calls/{uuid}")
    return match[1], uuid.UUID(match[2])


def conversation_name(project: str, conversation_id: str) -> str:
    """Formats `projects/{project}/conversations/{id}`; `project` is `projects/{project}`."""
    return f"{project}/conversations/{conversation_id}"


def parse_conversation_name(name: str, *, field: str = "name") -> tuple[str, str]:
    """Parses `projects/{project}/conversations/{id}`; returns `projects/{project}` and the id.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _CONVERSATION.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "projects/{project}/conversations/{id}")
    return match[1], match[2]


def annotation_name(project: str, annotation_id: uuid.UUID | str) -> str:
    """Formats `projects/{project}/annotations/{uuid}`; `project` is `projects/{project}`."""
    return f"{project}/annotations/{annotation_id}"


def parse_annotation_name(name: str, *, field: str = "name") -> tuple[str, uuid.UUID]:
    """Parses `projects/{project}/annotations/{uuid}`; returns `projects/{project}` and the id.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _ANNOTATION.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "projects/{project}/annotations/{uuid}")
    return match[1], uuid.UUID(match[2])


def schedule_name(project: str, schedule_id: str) -> str:
    """Formats `projects/{project}/schedules/{id}`; `project` is `projects/{project}`."""
    return f"{project}/schedules/{schedule_id}"


def parse_schedule_name(name: str, *, field: str = "name") -> tuple[str, str]:
    """Parses `projects/{project}/schedules/{id}`; returns `projects/{project}` and the id.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _SCHEDULE.fullmatch(name)
    if match is None:
        raise _malformed(field, name, "projects/{project}/schedules/{id}")
    return match[1], match[2]


def is_conversation_id(text: str) -> bool:
    """Returns whether a text can be the id of a conversation."""
    return _CONVERSATION.fullmatch(f"projects/x/conversations/{text}") is not None


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
    """Returns the trace id of a rollout or attempt name: the UUID's 32 hexadecimal digits."""
    return name.partition("/rollouts/")[2][:36].replace("-", "")


def trace_id_in(text: str) -> str:
    """Returns the trace id of the rollout or attempt name at the start of a text; empty if there is none."""
    match = _ROLLOUT.match(text)
    return match[2].replace("-", "") if match is not None else ""


def span_id_of(name: str) -> str:
    """Returns the id of the span for a whole rollout or attempt: 16 hexadecimal digits of its name's SHA-256."""
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
