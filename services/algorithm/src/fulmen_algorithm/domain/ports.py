"""What the domain needs of other services: the real implementations are in `clients`, a model of the store in the tests."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulmen_algorithm.domain.groups import FinishedGroup, GroupSpec
from fulmen_algorithm.domain.trajectory import RolloutTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One resource version.

    Attributes:
        name: `resources/{id}/versions/{n}`.
        version: The number in the name.
        data: Its content.
    """

    name: str
    version: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A policy version: its number, and where its weights are."""

    name: str
    version: int
    path: Path


class RolloutQueue(Protocol):
    """The store's queue and feed, for one run."""

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Adds groups, idempotently by run and group id; waits out an outage of the store."""

    def watch(self, cursor: str) -> AsyncIterator[FinishedGroup]:
        """Yields finished groups from a cursor on, for ever; goes on by itself after an outage."""

    async def trajectories(self, rollouts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Reads what the policy did in the deciding attempts of rollouts, by rollout name; wants attempt names."""

    async def known_train_groups(self, *, below: int) -> set[int]:
        """Lists the indices of submitted training groups, `below` and under left out."""

    async def cancel_all(self) -> None:
        """Cancels every rollout of the run that is not final."""


class ResourceShelf(Protocol):
    """The store's resources, for one project."""

    async def get(self, name: str) -> Content:
        """Reads a version.

        Raises:
            ResourceNotFound: if there is none.
        """

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Publishes a version, idempotently by `request_id`."""


class Serving(Protocol):
    """Where agents reach the policy: the engine, and the proxy's route to it."""

    async def serve(self, policy: PublishedPolicy, overrides: dict[str, str]) -> None:
        """Makes a policy version answer under the policy's name; `overrides` are JSON fields by mode."""

    async def swap(self, policy: PublishedPolicy) -> None:
        """Replaces the weights by another version of the policy that is served."""
