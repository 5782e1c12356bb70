"""Names and numbers of projects. A project keeps both, so they are cached, until all replicas learn that it is deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fulmen_store.database.database import Database
from fulmen_store.projects.projects import is_project_name, unknown_project

__all__ = ["NO_PROJECT", "ProjectNames"]

# Stands for an unknown project.
NO_PROJECT: Final = 0


class ProjectNames:
    """Translates between `projects/{project}` and the project's number in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def learn(self, number: int, name: str) -> None:
        """Records a project."""
        self._numbers[name] = number
        self._names[number] = name

    def learn_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Records all projects; the name of one that is deleted means none."""
        self._names |= {row["id"]: row["name"] for row in rows}
        self._numbers = {row["name"]: row["id"] for row in rows if not row["is_deleted"]}

    async def find(self, name: str) -> int:
        """Returns the number of a project; `NO_PROJECT` if it is unknown."""
        known = self._numbers.get(name)
        if known is None:
            row = await self._database.fetch_row("find_project", name) if is_project_name(name) else None
            if row is None:
                return NO_PROJECT
            known = row["id"]
            self.learn(known, name)
        return known

    async def find_all(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the numbers of projects by name; `NO_PROJECT` for unknown ones."""
        return {name: await self.find(name) for name in set(names)}

    async def require(self, name: str) -> int:
        """Returns the number of a project.

        Raises:
            ProjectNotFound: If it is unknown.
        """
        number = await self.find(name)
        if number == NO_PROJECT:
            raise unknown_project(name)
        return number

    async def load(self, numbers: Iterable[int]) -> None:
        """Reads the names of projects that are not known yet."""
        if any(number not in self._names for number in numbers):
            self.learn_all(await self._database.fetch("all_projects"))

    def name(self, number: int) -> str:
        """Returns the name of a project that was found or loaded before."""
        return self._names[number]
