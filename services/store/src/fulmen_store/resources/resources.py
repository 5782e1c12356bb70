"""Versioned resources: versions never change, aliases move.

Invariant: a resource's versions are numbered from 1 without gaps; `latest` points to the newest.
"""

from __future__ import annotations

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.kinds import content_problems, id_problems
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.versions import (
    LATEST,
    Alias,
    Publication,
    Version,
    parse_ref,
    publish_problem,
    violations_of,
)
from fulmen_store.run_leases.run_leases import RunFence

__all__ = [
    "Resources",
]


class Resources:
    """Publishes versions and moves aliases."""

    def __init__(self, *, table: ResourceTable, wakeups: Wakeups) -> None:
        self._table = table
        self._wakeups = wakeups

    async def publish(self, project_id: int, publication: Publication) -> list[Version]:
        """Publishes versions, all or none.

        Raises:
            ArgumentInvalid: With every problem of every version.
            EtagMismatch: If the latest version of a resource is not the expected one.
        """
        violations = violations_of(publication)
        for index, version in enumerate(publication.versions):
            found = id_problems(version.kind, version.resource) + content_problems(version.kind, version.content)
            for problem in found:
                field = f"resources[{index}].{problem.field}"
                violations.append(Violation(field=field, description=problem.description))
        if violations:
            raise publish_problem(violations)
        published = await self._table.publish(project_id, publication)
        self._wakeups.announce([("resources", project_id)])
        return published

    async def set_alias(
        self, project_id: int, name: str, version: int, *, etag: str, fence: RunFence | None = None
    ) -> Alias:
        """Points an alias to a version.

        Raises:
            ArgumentInvalid: If the name is not an alias, or the alias cannot be set.
            EtagMismatch: If the alias moved since it was read.
            ResourceNotFound: If the version does not exist.
            RunLeaseLost: If the fenced training run has another epoch.
        """
        ref = parse_ref(name, field="name")
        if not ref.alias or ref.alias == LATEST:
            text = "is not of the form resources/{resource}/aliases/{alias}, or names `latest`"
            raise ArgumentInvalid("The alias cannot be set.", violations=[Violation(field="name", description=text)])
        if etag and not etag.isdecimal():
            text = "was not issued by this service"
            raise ArgumentInvalid("The alias cannot be set.", violations=[Violation(field="etag", description=text)])
        alias = await self._table.set_alias(project_id, ref, version, revision=int(etag) if etag else None, fence=fence)
        self._wakeups.announce([("resources", project_id)])
        return alias
