"""Names of models from which runs start: `hf:org/name@revision` on a hub, `model:NAME` for an uploaded model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["FORM", "HUB_PREFIX", "MODEL_PREFIX", "HubName", "base_problem", "pinned"]

HUB_PREFIX: Final = "hf:"
MODEL_PREFIX: Final = "model:"
FORM: Final = "hf:organisation/name or hf:organisation/name@revision, such as hf:Qwen/Qwen3-0.6B@main"

_MODEL: Final = re.compile(rf"{MODEL_PREFIX}[a-z0-9._-]{{1,64}}")
_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPOSITORY: Final = re.compile(rf"(?:{_PART}/)?{_PART}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LONGEST_REPOSITORY: Final = 96
_NEVER: Final = ("..", "--", "//")
"""What no name has: the first climbs out of a folder, the second separates parts of folder names in the hub's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on a hub.

    Attributes:
        repository: `organisation/name`.
        revision: Branch, tag or commit.
    """

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Reads `hf:organisation/name@revision`; without a revision it is `main`.

        Raises:
            ValueError: if it has another form; the message has the expected form.
        """
        repository, at, revision = text.removeprefix(HUB_PREFIX).partition("@")
        is_well_formed = (
            text.startswith(HUB_PREFIX)
            and _REPOSITORY.fullmatch(repository)
            and len(repository) <= _LONGEST_REPOSITORY
            and (not at or _REVISION.fullmatch(revision))
            and not any(part in text.removeprefix(HUB_PREFIX) for part in _NEVER)
        )
        if not is_well_formed:
            raise ValueError(f"must be {FORM}")
        return cls(repository=repository, revision=revision or "main")

    @property
    def commit(self) -> str:
        """The revision if it is a commit, which never changes; otherwise empty."""
        return self.revision if _COMMIT.fullmatch(self.revision) else ""

    def at(self, commit: str) -> HubName:
        """Returns the model at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        """`hf:organisation/name@revision`."""
        return f"{HUB_PREFIX}{self.repository}@{self.revision}"


def base_problem(base: str) -> str:
    """Returns the problem with the name of a model from which a run starts; empty if it is valid."""
    if _MODEL.fullmatch(base):
        return ""
    try:
        HubName.parse(base)
    except ValueError as error:
        return f"{error}, or {MODEL_PREFIX}NAME for a model that was uploaded with `fulmen model upload`"
    return ""


def pinned(base: str, version: str) -> str:
    """Returns the immutable name of a model: with its commit on the hub, or with the digest of an upload."""
    return str(HubName.parse(base).at(version)) if base.startswith(HUB_PREFIX) else f"{MODEL_PREFIX}{version}"
