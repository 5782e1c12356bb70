"""Requests to create rollouts, and their validation.

Every problem of every rollout is found before anything is written, and all are reported together.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Final
from uuid import UUID

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import DEFAULT_PROJECT, NOT_DOTS, parse_rollout_name, parse_training_run_name, uuid7_unix_ms
from fulmen_store.resources.versions import VersionKey
from fulmen_store.rollouts.transitions import FailureKind, RetryPolicy
from fulmen_store.run_leases.run_leases import RunFence

__all__ = [
    "CHANGEABLE",
    "DUE_TIME",
    "MAX_STORED_BYTES",
    "RETRY_OF",
    "SCHEDULE",
    "NewRollout",
    "RolloutChange",
    "change_problems",
    "check_rollouts",
    "group_key_of",
]

# Metadata key that names the rollout that this one runs again; it does not count against the caller's limit.
RETRY_OF: Final = "fulmen.retry_of"
# Those that name the schedule that created it, and the time at which it was due; they do not count either.
SCHEDULE: Final = "fulmen.schedule"
DUE_TIME: Final = "fulmen.due_time"
OWN_METADATA: Final = frozenset({RETRY_OF, SCHEDULE, DUE_TIME})

MAX_ROLLOUTS: Final = 1000
MAX_INPUT_BYTES: Final = 256 * 1024
MAX_ROLLOUT_BYTES: Final = 384 * 1024
# A rollout that runs another one again names it besides.
MAX_STORED_BYTES: Final = MAX_ROLLOUT_BYTES + 1024
MAX_TEXT: Final = 128
MAX_TASK_TYPE: Final = 64
MAX_GROUP_SIZE: Final = 4096
MAX_RESOURCES: Final = 32
MAX_LABELS: Final = 16
MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 1024
MAX_PRIORITY: Final = 100
MAX_ATTEMPTS: Final = 100
MAX_TIMEOUT_S: Final = 24 * 3600.0
MAX_TIMEOUT_FACTOR: Final = 100
MAX_BACKOFF_S: Final = 60.0
MAX_TOKEN_BUDGET: Final = 10**12
MAX_ID_AGE_MS: Final = 3600 * 1000
MAX_ID_SKEW_MS: Final = 300 * 1000
MAX_MODE: Final = 3
LABEL_SEPARATOR: Final = "\x1f"
NONE: Final[Mapping[str, str]] = MappingProxyType({})
UNRESOLVED: Final = UUID(int=0)

# Fields of a live rollout that can be changed.
CHANGEABLE: Final = frozenset({"priority", "deadline_time"})
EVERY_PATH: Final = "*"

_PROJECT: Final = re.compile(r"projects/[a-z0-9-]{1,63}")
_RESOURCE_VERSION: Final = re.compile(rf"resources/{NOT_DOTS}[a-z0-9._-]{{1,128}}/versions/[1-9][0-9]{{0,17}}")
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,63}")


# Not frozen: one is created for every rollout, and freezing makes that four times as slow.
@dataclass(slots=True, kw_only=True)
class NewRollout:
    """A rollout to create: first as requested, then with the numbers that the store resolves its names to.

    Defaults of requests are declared only here. Attributes named like a column of `rollouts.sql` are written to it.

    Attributes:
        request: Serialized rollout, stored and sent to the runner; without name and state.
        name: Name chosen by the caller; empty to have one generated.
        retry_on: Numbers of failure kinds.
        retry_of: Final rollout that this one runs again; marked in the same commit.
        retry_once: Whether creation fails if `retry_of` is already marked.
        id: Resolved from `name`, or generated.
        task_type: Number of `task_type_name`, which is the agent's resource by default.
        agent: Number of `agent_name`.
        uses: Pinned versions with a ttl.
        matched: Runner session that gets the first lease in the commit that creates the rollout.
        fence: Epoch that a training run must have in the commit that creates the rollout.
    """

    request: bytes
    name: str = ""
    project: str = DEFAULT_PROJECT
    training_run: str = ""
    group_id: str = ""
    group_size: int = 1
    mode: int = 1
    input_size: int = 0
    content_type: str = "application/json"
    agent_name: str = ""
    resource_versions: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    not_before: datetime.datetime | None = None
    required_labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    max_attempts: int = 3
    attempt_timeout_s: float = 900.0
    retry_on: Sequence[int] = ()
    retry_backoff_s: float = 1.0
    task_type_name: str = ""
    deadline: datetime.datetime | None = None
    hedged: bool = False
    model_token_budget: int = 0
    timeout_quantile: float = 0.0
    timeout_factor: float = 0.0
    retry_of: UUID | None = None
    retry_once: bool = False

    id: UUID = UNRESOLVED
    project_id: int = 0
    run_id: int | None = None
    group_key: UUID | None = None
    task_type: int | None = None
    agent: int | None = None
    uses: Sequence[VersionKey] = ()
    matched: UUID | None = None
    fence: RunFence | None = None

    @property
    def request_bytes(self) -> int:
        """The size of the request."""
        return len(self.request)

    @property
    def sort_priority(self) -> int:
        """The negated priority: lower values go first."""
        return -self.priority

    @property
    def timeout_ms(self) -> int:
        """The timeout of an attempt, milliseconds."""
        return max(1, round(self.attempt_timeout_s * 1000))

    @property
    def backoff_ms(self) -> int:
        """The wait before the second attempt, milliseconds."""
        return round(self.retry_backoff_s * 1000)

    @property
    def retry_mask(self) -> int:
        """The mask of a `RetryPolicy`."""
        return _mask(tuple(self.retry_on))

    @property
    def labels(self) -> frozenset[str]:
        """The required labels as `key=value` strings."""
        return frozenset(f"{key}={value}" for key, value in self.required_labels.items())

    @property
    def label_text(self) -> str | None:
        """The required labels, sorted and joined by `LABEL_SEPARATOR`; None without any."""
        return LABEL_SEPARATOR.join(sorted(self.labels)) if self.required_labels else None

    @property
    def default_task_type(self) -> str:
        """The resource id of the agent, such as `agent.x` of `resources/agent.x/versions/3`; empty without an agent."""
        return self.agent_name.split("/")[1] if self.agent_name else ""

    @property
    def versions(self) -> tuple[str, ...]:
        """The names of all pinned resource versions, without duplicates."""
        if not self.resource_versions:
            return (self.agent_name,) if self.agent_name else ()
        return tuple(sorted({*self.resource_versions.values(), *([self.agent_name] if self.agent_name else ())}))

    @property
    def scope(self) -> tuple[str, str, str, str]:
        """The names to resolve: project, training run, task type and agent."""
        return self.project, self.training_run, self.task_type_name, self.agent_name


def group_key_of(project_id: int, training_run: str, group_id: str) -> UUID:
    """Returns the key of a group: its id within its training run, or within its project if it has none."""
    return UUID(bytes=sha256(f"{project_id}\0{training_run}\0{group_id}".encode()).digest()[:16])


@lru_cache(maxsize=1024)
def _mask(retry_on: tuple[int, ...]) -> int:
    return RetryPolicy.mask_of(frozenset(map(FailureKind, retry_on)))


def check_rollouts(rollouts: Sequence[NewRollout], *, request_id: str, now_ms: int | None) -> None:
    """Checks a whole request.

    Args:
        rollouts: Rollouts to create.
        request_id: Caller's id of the request; may be empty.
        now_ms: Store's clock, Unix milliseconds; None leaves the times of names and deadlines unchecked.

    Raises:
        ArgumentInvalid: With every problem of every rollout.
    """
    violations = [
        Violation(field=f"rollouts[{index}].{path}".rstrip("."), description=text)
        for index, rollout in enumerate(rollouts)
        for path, text in _problems(rollout, now_ms)
    ]
    if not 1 <= len(rollouts) <= MAX_ROLLOUTS:
        violations.append(
            Violation(field="rollouts", description=f"has {len(rollouts)} entries, allowed are 1 to 1000")
        )
    if len(request_id) > MAX_TEXT:
        violations.append(Violation(field="request_id", description="is longer than 128 characters"))
    violations += _group_problems(rollouts)
    names = [rollout.name for rollout in rollouts if rollout.name]
    if len(set(names)) != len(names):
        violations.append(Violation(field="rollouts", description="names a rollout twice"))
    if violations:
        raise ArgumentInvalid("The rollouts cannot be created.", violations=violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChange:
    """A change of a live rollout.

    Attributes:
        paths: Fields to change; `*` for all that can be changed.
        values: Their values; the rest of it does not count.
    """

    paths: frozenset[str]
    values: NewRollout

    def changes(self, path: str) -> bool:
        """Returns whether a field is changed."""
        return path in self.paths or EVERY_PATH in self.paths


def change_problems(change: RolloutChange, *, now_ms: int) -> list[Violation]:
    """Returns every problem of a change.

    Args:
        change: The change.
        now_ms: Store's clock, Unix milliseconds.
    """
    fields = " and ".join(sorted(CHANGEABLE))
    if not change.paths:
        return [Violation(field="update_mask", description=f"is required if neither {fields} is set")]
    unknown = sorted(change.paths - CHANGEABLE - {EVERY_PATH})
    violations = [
        Violation(field="update_mask", description=f"`{path[:MAX_TEXT]}` cannot be changed, only {fields} can")
        for path in unknown
    ]
    violations += [
        Violation(field=f"rollout.{path}", description=text)
        for path, text in _schedule_problems(change.values, now_ms)
        if change.changes(path)
    ]
    return violations


def _problems(rollout: NewRollout, now_ms: int | None) -> Iterator[tuple[str, str]]:
    if rollout.name:
        yield from _name_problems(rollout.name, rollout.project, now_ms)
    if not _PROJECT.fullmatch(rollout.project):
        yield "project", "is not of the form projects/{project}"
    if rollout.training_run:
        yield from _run_problems(rollout.training_run, rollout.project)
    if rollout.group_id or rollout.group_size != 1:
        yield from _membership_problems(rollout)
    if not 0 <= rollout.mode <= MAX_MODE:
        yield "mode", f"{rollout.mode} is not a known mode"
    if rollout.input_size > MAX_INPUT_BYTES:
        yield "input", f"has {rollout.input_size} bytes, at most {MAX_INPUT_BYTES} are allowed"
    most_bytes = MAX_ROLLOUT_BYTES if rollout.retry_of is None else MAX_STORED_BYTES
    if rollout.request_bytes > most_bytes:
        yield "", f"has {rollout.request_bytes} bytes in all, at most {most_bytes} are allowed"
    if len(rollout.content_type) > MAX_TEXT:
        yield "input_content_type", "is longer than 128 characters"
    if rollout.agent_name and not _RESOURCE_VERSION.fullmatch(rollout.agent_name):
        yield "agent", "is not of the form resources/{id}/versions/{n}"
    yield from _schedule_problems(rollout, now_ms)
    if rollout.resource_versions or rollout.required_labels or rollout.metadata:
        yield from _map_problems(rollout)
    yield from _policy_problems(rollout)


def _schedule_problems(rollout: NewRollout, now_ms: int | None) -> Iterator[tuple[str, str]]:
    if not -MAX_PRIORITY <= rollout.priority <= MAX_PRIORITY:
        yield "priority", f"is {rollout.priority}, allowed are -100 to 100"
    if len(rollout.task_type_name) > MAX_TASK_TYPE:
        yield "task_type", f"is longer than {MAX_TASK_TYPE} characters"
    if now_ms is not None and rollout.deadline is not None and rollout.deadline.timestamp() * 1000 <= now_ms:
        yield "deadline_time", "has passed"


def _membership_problems(rollout: NewRollout) -> Iterator[tuple[str, str]]:
    if len(rollout.group_id) > MAX_TEXT:
        yield "group_id", "is longer than 128 characters"
    if not 1 <= rollout.group_size <= MAX_GROUP_SIZE:
        yield "group_size", f"is {rollout.group_size}, allowed are 1 to {MAX_GROUP_SIZE}"
    elif rollout.group_size > 1 and not rollout.group_id:
        yield "group_id", "is required if group_size is greater than 1"


def _name_problems(name: str, project: str, now_ms: int | None) -> Iterator[tuple[str, str]]:
    try:
        parsed = parse_rollout_name(name)
    except ArgumentInvalid:
        yield "name", "is not of the form projects/{project}/rollouts/{uuid7}"
        return
    rollout_id = parsed.rollout_id
    if parsed.project != project:
        yield "name", "is not in the rollout's project"
    if rollout_id.version != 7 or rollout_id.variant != uuid.RFC_4122:
        yield "name", "does not contain a UUID of version 7 in lower case"
    elif now_ms is not None and not now_ms - MAX_ID_AGE_MS <= uuid7_unix_ms(rollout_id) <= now_ms + MAX_ID_SKEW_MS:
        yield "name", "contains a time more than 1 hour before or 5 minutes after the store's clock"


def _run_problems(training_run: str, project: str) -> Iterator[tuple[str, str]]:
    try:
        if parse_training_run_name(training_run).project != project:
            yield "training_run", "is not in the rollout's project"
    except ArgumentInvalid:
        yield "training_run", "is not of the form projects/{project}/trainingRuns/{id}"


def _map_problems(rollout: NewRollout) -> Iterator[tuple[str, str]]:
    if len(rollout.resource_versions) > MAX_RESOURCES:
        yield "resource_versions", f"has more than {MAX_RESOURCES} entries"
    for key, value in rollout.resource_versions.items():
        if not _RESOURCE_VERSION.fullmatch(value):
            yield f"resource_versions[{key[:MAX_TEXT]}]", "is not of the form resources/{id}/versions/{n}"
    if len(rollout.required_labels) > MAX_LABELS:
        yield "required_labels", f"has more than {MAX_LABELS} entries"
    for key, value in rollout.required_labels.items():
        if not _LABEL_KEY.fullmatch(key) or len(value) > MAX_TEXT or not value.isprintable():
            yield f"required_labels[{key[:MAX_TEXT]}]", "is not a key of [A-Za-z0-9._/-] with a printable value"
    if len(rollout.metadata.keys() - OWN_METADATA) > MAX_METADATA:
        yield "metadata", f"has more than {MAX_METADATA} entries"
    for key, value in rollout.metadata.items():
        if len(key.encode()) + len(value.encode()) > MAX_METADATA_BYTES:
            yield f"metadata[{key[:MAX_TEXT]}]", "is larger than 1 KiB"


def _policy_problems(rollout: NewRollout) -> Iterator[tuple[str, str]]:
    if not 1 <= rollout.max_attempts <= MAX_ATTEMPTS:
        yield "policy.max_attempts", f"is {rollout.max_attempts}, allowed are 1 to 100"
    if not 0 < rollout.attempt_timeout_s <= MAX_TIMEOUT_S:
        yield "policy.attempt_timeout", f"is {rollout.attempt_timeout_s:g} s, must be greater than 0 s and at most 24 h"
    if not 0 <= rollout.retry_backoff_s <= MAX_BACKOFF_S:
        yield "policy.retry_backoff", f"is {rollout.retry_backoff_s:g} s, allowed are 0 s to 60 s"
    if not 0 <= rollout.model_token_budget <= MAX_TOKEN_BUDGET:
        yield "policy.model_token_budget", f"is {rollout.model_token_budget}, allowed are 1 to {MAX_TOKEN_BUDGET}"
    if rollout.timeout_quantile and not 0 < rollout.timeout_quantile < 1:
        yield (
            "policy.attempt_timeout_quantile",
            f"is {rollout.timeout_quantile:g}, must be greater than 0 and less than 1",
        )
    if rollout.timeout_factor and not 1 <= rollout.timeout_factor <= MAX_TIMEOUT_FACTOR:
        yield "policy.attempt_timeout_factor", f"is {rollout.timeout_factor:g}, allowed are 1 to {MAX_TIMEOUT_FACTOR}"
    if rollout.timeout_factor and not rollout.timeout_quantile:
        yield "policy.attempt_timeout_factor", "needs attempt_timeout_quantile"
    for kind in rollout.retry_on:
        if not FailureKind.AGENT_ERROR <= kind <= FailureKind.RELEASED:
            yield "policy.retry_on", f"{kind} is not a known failure kind"


def _group_problems(rollouts: Iterable[NewRollout]) -> list[Violation]:
    sizes: dict[tuple[str, str, str], int] = {}
    counts: dict[tuple[str, str, str], int] = {}
    violations = []
    for index, rollout in enumerate(rollouts):
        if not rollout.group_id:
            continue
        key = (rollout.project, rollout.training_run, rollout.group_id)
        counts[key] = counts.get(key, 0) + 1
        if sizes.setdefault(key, rollout.group_size) != rollout.group_size:
            violations.append(
                Violation(field=f"rollouts[{index}].group_size", description="differs from its group's other members")
            )
        elif counts[key] > rollout.group_size:
            violations.append(
                Violation(field=f"rollouts[{index}].group_id", description="the group has more members than group_size")
            )
    return violations
