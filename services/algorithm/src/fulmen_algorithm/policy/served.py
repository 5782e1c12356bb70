"""The served versions, persisted across restarts of the service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.runs.ports import PublishedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy version served under its policy's name.

    Attributes:
        policy: The version.
        overrides: Request fields as JSON, by rollout mode.
        engine: Engine that serves it.
    """

    policy: PublishedPolicy
    overrides: Mapping[str, str]
    engine: EngineSettings


class ServedFile(Protocol):
    """Storage of the served versions."""

    def save(self, served: Sequence[ServedPolicy]) -> None:
        """Replaces the stored list."""

    def load(self) -> list[ServedPolicy]:
        """Returns the stored list without the versions that can no longer be served."""
