"""Entries of the audit log: what is kept of a line, and whose it is."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT, uuid7
from fulmen_service_kit.security.permissions import Scope, rule

__all__ = ["Entry", "entry_of"]

WHOLE_BYTES: Final = 16 * 1024
"""Size up to which the fields of a request are kept whole; of larger ones the lists are cut."""
LISTED: Final = 8
_PROJECT: Final = re.compile(r"projects/[a-z0-9-]{1,63}(?![^/])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored entry; `request` is JSON."""

    id: UUID
    project: str
    action: str
    code: str
    reason: str
    actor: str
    role: str
    token_id: str
    request: str
    trace_id: str
    left_out: int
    ended_at: datetime.datetime

    def with_more_left_out(self, count: int) -> Entry:
        """Returns the entry with so many more calls that got none."""
        return replace(self, left_out=self.left_out + count)


def entry_of(line: Mapping[str, Any]) -> Entry:
    """Returns what is kept of a line of the audit log."""
    ended_at = datetime.datetime.fromisoformat(line["timestamp"])
    return Entry(
        id=uuid7(int(ended_at.timestamp() * 1000)),
        project=_project(line),
        action=line["rpc"].rpartition(".")[2],
        code=line["code"],
        reason=line["reason"],
        # PostgreSQL stores no NUL in a text; one entry must not hold up the others.
        actor=line["subject"].replace("\0", ""),
        role=line["role"],
        token_id=line["token_id"],
        request=_request(line["asked"]),
        trace_id=line["trace_id"],
        left_out=line.get("left_out", 0),
        ended_at=ended_at,
    )


def _project(line: Mapping[str, Any]) -> str:
    """Returns the project whose admins see an entry.

    The token's project: a refused call for another project's objects does not concern that project. For a token for all
    projects, the one that the request names, by default the default one, unless the call is about all of them.
    """
    if line["project"] not in ("", ALL_PROJECTS):
        return str(line["project"])
    action = rule(line["rpc"])
    if not line["project"] or action.scope is Scope.DEPLOYMENT:
        return ALL_PROJECTS
    for text in _texts(line["asked"].values()):
        if (match := _PROJECT.match(text)) is not None:
            return match[0]
    names_one = any(path.rpartition(".")[2] == "project" for path in action.audited or ())
    return DEFAULT_PROJECT if names_one else ALL_PROJECTS


def _texts(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        yield from map(str, value) if isinstance(value, list) else (str(value),)


def _request(asked: Mapping[str, Any]) -> str:
    whole = _json(asked)
    if len(whole) <= WHOLE_BYTES:
        return whole
    return _json(
        {path: value[:LISTED] if isinstance(value, list) else value for path, value in asked.items()} | {"cut": True}
    )


def _json(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, separators=(",", ":"), default=str)
