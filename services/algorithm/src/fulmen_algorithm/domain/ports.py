"""What the domain needs of other services: the real implementations are in `clients`, a model of the store in the tests."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulmen_algorithm.domain.groups import FinishedGroup, GroupSpec
from fulmen_algorithm.domain.trajectory import RolloutTrajectory
from fulmen_algorithm.training.policy import PolicyModel

Notify = Callable[[str, str], None]
"""Takes a severity (`info`, `warning`, `error`) and a text for a person."""


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

    async def trajectories(self, attempts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Reads what the policy did in attempts, by attempt name."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """A model folder that is complete.

    Attributes:
        path: The folder, in the format of `transformers`.
        sha256: Of its weights, hexadecimal.
        size_bytes: Of all its files.
    """

    path: Path
    sha256: str
    size_bytes: int


class RunStorage(Protocol):
    """What a run keeps on disk, besides its checkpoints and its events."""

    def append_consumed(self, records: Sequence[Mapping[str, object]]) -> int:
        """Appends what a step consumed, durably; returns the size of the file in bytes."""

    def truncate_consumed(self, size_bytes: int) -> None:
        """Takes back what was appended after a checkpoint."""

    def append_version(self, record: Mapping[str, object]) -> None:
        """Notes a published version."""

    def versions(self) -> list[dict[str, object]]:
        """Returns every version that the run ever published."""

    def save_note(self, name: str, note: Mapping[str, object]) -> None:
        """Keeps a note for the report."""

    def notes(self) -> dict[str, dict[str, object]]:
        """Returns the notes."""

    def save_model(self, policy: PolicyModel, step: int) -> SavedModel:
        """Writes the weights to a folder of their own, whose name says step and checksum."""

    def prune_models(self, keep: Sequence[Path]) -> None:
        """Removes all model folders but these."""


class Serving(Protocol):
    """Where agents reach the policy: the engine, and the proxy's route to it."""

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Makes a policy version answer under the policy's name; `overrides` are JSON fields by mode."""

    async def swap(self, policy: PublishedPolicy) -> None:
        """Replaces the weights by another version of the policy that is served."""

    async def sampled_tokens(self) -> int:
        """Returns how many tokens the policy has sampled so far, for whomever; never fewer than before."""
