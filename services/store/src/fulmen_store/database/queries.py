"""The store's SQL, by name: every statement lives in a `.sql` file beside its table, under a line `-- name: ...`.

The expressions of which filters are made live in `rollouts/fragments/*.sql`, in the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Final

__all__ = ["FRAGMENTS", "SQL", "filtered"]

_MARK: Final = "-- name: "
_FILTER_MARK: Final = "true /* filter */"


@cache
def _load(*folders: str) -> Mapping[str, str]:
    package = resources.files("fulmen_store")
    files = [file for folder in folders for file in package.joinpath(folder).iterdir() if file.name.endswith(".sql")]
    found: dict[str, str] = {}
    for file in sorted(files, key=lambda entry: entry.name):
        for name, statement in _statements(file.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"two statements are called {name}")
            found[name] = statement
    return found


def _statements(text: str) -> Iterator[tuple[str, str]]:
    for block in text.split(f"\n{_MARK}" if not text.startswith(_MARK) else _MARK)[1:]:
        for part in block.split(f"\n{_MARK}"):
            name, _, statement = part.partition("\n")
            yield name.strip(), statement.strip().rstrip(";")


class _Sql:
    """Looks up statements by name."""

    def __init__(self, *folders: str) -> None:
        self._folders = folders

    def __getitem__(self, name: str) -> str:
        return _load(*self._folders)[name]

    def items(self) -> Iterator[tuple[str, str]]:
        """Returns every statement with its name."""
        return iter(_load(*self._folders).items())


SQL: Final = _Sql(
    "database", "leases", "projects", "replicas", "resources", "retention", "rollouts", "runners", "scheduling",
    "spans", "usage",
)  # fmt: skip
FRAGMENTS: Final = _Sql("rollouts/fragments")


def filtered(name: str, condition: str) -> str:
    """Returns a named statement with a condition, made of fragments only, where it has a place for one."""
    before, mark, after = SQL[name].partition(_FILTER_MARK)
    if not mark:
        raise KeyError(f"the statement {name} has no place for a filter")
    return f"{before}{condition}{after}"
