"""Finds the versions that a new rollout protects from removal: those that it names and that have a ttl.

A version's ttl never changes, so it is read once. A cached version may have been removed since; the commit that creates
the rollout detects this, see docs/decisions/0007.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.versions import VersionKey, parse_ref, version_was_removed

__all__ = [
    "ExpiringVersions",
]

VERSIONS_REMEMBERED: Final = 10_000


class ExpiringVersions:
    """Finds the versions that have a ttl."""

    def __init__(self, table: ResourceTable) -> None:
        """Starts with an empty cache of existing versions."""
        self._table = table
        self._known: OrderedDict[tuple[int, str], VersionKey | None] = OrderedDict()

    async def uses_of(self, pinned: Sequence[tuple[int, Sequence[str]]]) -> list[tuple[VersionKey, ...]]:
        """Returns the versions with a ttl for each rollout, given as its project and the names that it pins.

        Versions that were never published are skipped.

        Raises:
            ArgumentInvalid: If versions have been removed; lists all of them in one project.
        """
        named: dict[int, set[str]] = {}
        for project_id, names in pinned:
            if names:
                named.setdefault(project_id, set()).update(names)
        found = {project_id: await self._find(project_id, names) for project_id, names in named.items()}
        if not any(found.values()):
            return [()] * len(pinned)
        return [
            tuple(key for name in names if (key := found[project_id].get(name)) is not None)
            for project_id, names in pinned
        ]

    async def _find(self, project_id: int, names: Collection[str]) -> dict[str, VersionKey]:
        unknown = [name for name in names if (project_id, name) not in self._known]
        found = {name: key for name in names if (key := self._known.get((project_id, name))) is not None}
        if not unknown:
            return found
        refs = [parse_ref(name, field="rollouts[].resource_versions") for name in unknown]
        versions = [(ref.resource, ref.version) for ref in refs if ref.version is not None]
        lifetimes = await self._table.lifetimes(project_id, versions)
        removed = [one.name for one in lifetimes if one.removed]
        if removed:
            raise version_was_removed(removed)
        for one in lifetimes:
            self._known[project_id, one.name] = one.key if one.expiring else None
            if one.expiring:
                found[one.name] = one.key
        while len(self._known) > VERSIONS_REMEMBERED:
            self._known.popitem(last=False)
        return found
