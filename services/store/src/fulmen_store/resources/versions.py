"""Versions of resources, their names and the limits on what may be published."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.errors import ArgumentInvalid, ResourceNotFound, Violation
from fulmen.ids import NOT_DOTS
from fulmen_store.malformed import malformed
from fulmen_store.run_leases.run_leases import RunFence

__all__ = [
    "Alias",
    "NewVersion",
    "Publication",
    "ResourceRef",
    "Version",
    "VersionKey",
    "parse_ref",
    "version_was_removed",
]

MAX_BATCH: Final = 64


MAX_CONTENT_BYTES: Final = 16 * 1024 * 1024


MAX_METADATA: Final = 32


MAX_METADATA_BYTES: Final = 1024


MAX_TEXT: Final = 128


MAX_DEPENDENCIES: Final = 32


MAX_VERSION: Final = 10**18


MIN_TTL_S: Final = 60.0


MAX_TTL_S: Final = 10 * 365.25 * 86_400.0


LATEST: Final = "latest"


_ID: Final = rf"{NOT_DOTS}[a-z0-9._-]{{1,128}}"


_REF: Final = re.compile(
    rf"resources/({_ID})(?:/versions/([1-9][0-9]{{0,17}})|/aliases/({NOT_DOTS}[a-z0-9._-]{{1,64}}))?"
)


_KIND: Final = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRef:
    """A parsed name: a resource with a version or an alias (`latest` if neither is given)."""

    resource: str
    version: int | None = None
    alias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version to publish.

    Attributes:
        dependencies: Names of the versions that it depends on.
        ttl_s: Minimum time for which it is kept, seconds; None means forever.
    """

    resource: str
    kind: str
    content_type: str
    content: bytes
    parent: str
    metadata: Mapping[str, str]
    dependencies: Sequence[str] = ()
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Versions that are published atomically.

    Attributes:
        request_id: Caller's id of the request; may be empty.
        expected: Required number of `latest`, by resource id; 0 if the resource must not exist yet.
        fence: Epoch that a training run must have in the commit.
    """

    versions: Sequence[NewVersion]
    request_id: str = ""
    expected: Mapping[str, int] = field(default_factory=dict)
    fence: RunFence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published version."""

    resource_id: int
    resource: str
    kind: str
    version: int
    content_type: str
    content: bytes
    sha256: bytes
    size_bytes: int
    parent: str
    metadata: Mapping[str, str]
    created_at: datetime.datetime
    dependencies: Sequence[str] = ()
    ttl_s: float | None = None
    expires_at: datetime.datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """An alias and the version that it points to; the revision changes with every move."""

    resource_id: int
    resource: str
    alias: str
    version: int
    revision: int
    updated_at: datetime.datetime


def parse_ref(name: str, *, field: str) -> ResourceRef:
    """Parses `resources/{id}`, `.../versions/{n}` or `.../aliases/{alias}`.

    Raises:
        ArgumentInvalid: If the name is malformed.
    """
    match = _REF.fullmatch(name)
    if match is None:
        raise malformed(
            field, f"{name[:MAX_TEXT]!r} is not of the form resources/{{id}}[/versions/{{n}}|/aliases/{{alias}}]"
        )
    version, alias = match[2], match[3]
    if version:
        return ResourceRef(resource=match[1], version=int(version))
    return ResourceRef(resource=match[1], alias=alias or "")


def not_found(name: str) -> ResourceNotFound:
    """Creates the error for a resource, version or alias that does not exist."""
    return ResourceNotFound("The resource, version or alias does not exist.", resource=name)


def publish_problem(violations: Sequence[Violation]) -> ArgumentInvalid:
    """Creates the error that lists every problem of a publication."""
    return ArgumentInvalid("The resources cannot be published.", violations=violations)


def violations_of(publication: Publication) -> list[Violation]:
    """Returns the violations of a publication, except in its contents."""
    versions, violations = publication.versions, list[Violation]()
    if not 1 <= len(versions) <= MAX_BATCH:
        violations.append(
            Violation(field="resources", description=f"has {len(versions)} entries, allowed are 1 to {MAX_BATCH}")
        )
    if len(publication.request_id) > MAX_TEXT:
        violations.append(Violation(field="request_id", description="is longer than 128 characters"))
    if len(publication.expected) > MAX_BATCH:
        violations.append(Violation(field="expected_latest_versions", description=f"has more than {MAX_BATCH} entries"))
    for resource, number in publication.expected.items():
        if not re.fullmatch(_ID, resource) or not 0 <= number < MAX_VERSION:
            text = "is not the number of a version by a name of the form resources/{id}"
            violations.append(Violation(field=f"expected_latest_versions[{resource[:MAX_TEXT]}]", description=text))
    for index, version in enumerate(versions):
        for path, text in _problems(version):
            violations.append(Violation(field=f"resources[{index}].{path}", description=text))
    return violations


def _problems(version: NewVersion) -> list[tuple[str, str]]:
    problems = []
    if not re.fullmatch(_ID, version.resource):
        problems.append(("name", "is not of the form resources/{id}, an id of [a-z0-9._-], not of dots alone"))
    if not _KIND.fullmatch(version.kind):
        problems.append(("kind", "is not 1 to 32 characters of [a-z0-9_-]"))
    if len(version.content) > MAX_CONTENT_BYTES:
        problems.append(("content", f"has {len(version.content)} bytes, at most {MAX_CONTENT_BYTES} are allowed"))
    if len(version.content_type) > MAX_TEXT:
        problems.append(("content_type", "is longer than 128 characters"))
    if version.parent and (not (match := _REF.fullmatch(version.parent)) or not match[2]):
        problems.append(("parent", "is not of the form resources/{id}/versions/{n}"))
    too_large = any(len(k.encode()) + len(v.encode()) > MAX_METADATA_BYTES for k, v in version.metadata.items())
    if len(version.metadata) > MAX_METADATA or too_large:
        problems.append(("metadata", f"has more than {MAX_METADATA} entries, or one larger than 1 KiB"))
    return problems + _keeping_problems(version)


def _keeping_problems(version: NewVersion) -> list[tuple[str, str]]:
    problems = []
    if len(version.dependencies) > MAX_DEPENDENCIES:
        problems.append(("dependencies", f"has more than {MAX_DEPENDENCIES} entries"))
    for position, name in enumerate(version.dependencies):
        if not (match := _REF.fullmatch(name)) or not match[2]:
            problems.append((f"dependencies[{position}]", "is not of the form resources/{id}/versions/{n}"))
    if version.ttl_s is not None and not MIN_TTL_S <= version.ttl_s <= MAX_TTL_S:
        problems.append(("ttl", f"is {version.ttl_s:g} s, allowed are 1 minute to 10 years"))
    return problems


VersionKey = tuple[int, int]
"""Database number of a resource, and number of a version."""


def version_was_removed(names: Sequence[str] = ()) -> ArgumentInvalid:
    """Creates the error for rollouts that name removed versions."""
    texts = [f"{name} has been removed because its ttl has expired" for name in names] or ["a version has been removed"]
    return ArgumentInvalid(
        "The rollouts cannot be created.",
        violations=[Violation(field="rollouts[].resource_versions", description=text) for text in texts],
    )
