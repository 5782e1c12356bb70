"""What is served, as it is kept over restarts of the service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.runs.ports import PublishedPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy version that answers under its policy's name.

    Attributes:
        policy: The version.
        overrides: Request fields as JSON, by rollout mode.
        engine: What it is served with.
    """

    policy: PublishedPolicy
    overrides: Mapping[str, str]
    engine: EngineSettings


class ServedFile(Protocol):
    """Where it is kept what is served."""

    def save(self, served: Sequence[ServedPolicy]) -> None:
        """Replaces what is kept."""

    def load(self) -> list[ServedPolicy]:
        """Returns what was kept last; what cannot be served any more is left out."""
