"""Paths that name an attempt: `/rollouts/{rollout}/attempts/{n}` before the path of any API.

For agents whose key cannot be changed for each attempt: they are given another base URL instead.
"""

from __future__ import annotations

from fulmen.errors import ArgumentInvalid, AttemptNotFound
from fulmen.ids import AttemptName, parse_attempt_name

_PREFIX = "/rollouts/"
_ROOTS = ("v1/", "openai/")
_PARTS = 5
"""Of a path that names an attempt: nothing, `rollouts`, its id, `attempts`, its number; then the path of an API."""


def without_attempt(path: str) -> str:
    """Returns the path of the API, without the attempt that may stand before it."""
    if not path.startswith(_PREFIX):
        return path
    parts = path.split("/", _PARTS)
    named = len(parts) > _PARTS and parts[_PARTS].startswith(_ROOTS)
    return "/" + parts[_PARTS] if named else path


def attempt_in(path: str) -> AttemptName | None:
    """Returns the attempt that a path names; None if it names none.

    Raises:
        AttemptNotFound: if what it names cannot be an attempt.
    """
    if not path.startswith(_PREFIX):
        return None
    name = "/".join(path.split("/", _PARTS)[1:_PARTS])
    try:
        return parse_attempt_name(name)
    except ArgumentInvalid:
        raise AttemptNotFound("The URL does not name an attempt: /rollouts/{id}/attempts/{number}/v1/...") from None
