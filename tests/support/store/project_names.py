"""Names of projects that are known without a database."""

from __future__ import annotations

from typing import Any, cast

from fulmen.ids import DEFAULT_PROJECT
from fulmen_store.projects.names import ProjectNames

__all__ = ["known_projects"]


def known_projects() -> ProjectNames:
    """Returns names that know the default project as number 1."""
    projects = ProjectNames(cast("Any", None))
    projects.learn(1, DEFAULT_PROJECT)
    return projects
