"""Interfaces of a run to the store, the engines and other models, and the values that they exchange."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from fulmen_algorithm.rollouts.groups import FinishedGroup, GroupSpec
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.settings import DEFAULT_ADAPTER, WeightsKind

Notify = Callable[[str, str], None]
"""Appends a notice: a severity (`info`, `warning`, `error`) and a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Which GPUs of this machine the parts of a run would get, or where they would be on clusters.

    Attributes:
        text: The plan in sentences, also if no GPUs are needed or used; empty if there are problems.
        problems: Every reason why the run can never run here, or does not fit a cluster as it is now.
    """

    text: str = ""
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One resource version.

    Attributes:
        name: `resources/{id}/versions/{n}`.
        version: The number in the name.
        data: Its content.
        kind: Kind of the resource, which decides who may publish it.
    """

    name: str
    version: int
    data: bytes
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A policy version and the location of its weights.

    Attributes:
        name: `resources/policy.{policy}/versions/{n}`.
        version: The number in the name.
        kind: Content of `path`.
        path: full: a complete model folder in the format of `transformers`. delta: a folder with `delta.safetensors`,
            the difference from `base_version`. lora: a folder with one folder in peft's format per adapter.
        sha256: Checksum of the version's weights in the served dtype (`weights.tensor_files.Weights`); empty if
            unknown.
        base_version: delta: version to which it applies.
        base_sha256: delta: checksum of the weights of `base_version`.
        base_model: lora: the complete folder on which the adapters were trained.
        adapters: lora: folder by role; a single adapter without role is called `default`.
        rebuild: Builds and returns a complete folder, for an engine that restarts or supports no deltas or adapters;
            call `model_folder` instead. lora: with the adapter merged, if available.
    """

    name: str
    version: int
    path: Path
    kind: WeightsKind = WeightsKind.FULL
    sha256: str = ""
    base_version: int = 0
    base_sha256: str = ""
    base_model: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    rebuild: Callable[[], Awaitable[Path]] | None = field(default=None, compare=False, repr=False)

    @property
    def policy(self) -> str:
        """The policy's name, which is its public model name."""
        return self.name.removeprefix("resources/policy.").rpartition("/versions/")[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The public model names: the policy's, and `{policy}.{role}` for each adapter of a role."""
        roles = [role for role in self.adapters if role != DEFAULT_ADAPTER]
        return (self.policy, *(f"{self.policy}.{role}" for role in roles))

    async def model_folder(self) -> Path:
        """Returns a complete model folder with these weights.

        Raises:
            RunFailed: if a dependency is missing or damaged.
        """
        if self.kind is WeightsKind.FULL:
            return self.path
        if self.rebuild is None:
            raise RunFailed(f"{self.name} is not a complete model, and cannot be rebuilt to one.")
        return await self.rebuild()


class RolloutQueue(Protocol):
    """The store's queue and feed, for one run."""

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Submits groups, idempotently by run and group id; waits while the store is unavailable."""

    def watch(self, cursor: str) -> AsyncIterator[FinishedGroup]:
        """Yields finished groups after a cursor, indefinitely; reconnects after an outage."""

    async def trajectories(self, attempts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Reads the trajectories of attempts, by attempt name."""

    async def known_train_groups(self, *, below: int, branch: int) -> set[int]:
        """Lists the indices, at least `below`, of the training groups submitted in a branch."""

    async def cancel_all(self) -> None:
        """Cancels every rollout of the run that is not final."""

    async def finished_of(self, training_run: str) -> list[FinishedGroup]:
        """Reads the finished groups of another run of the project, in feed order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFence:
    """The epoch of a run's lease; the store refuses what carries an older one.

    Attributes:
        training_run: `projects/{project}/trainingRuns/{id}`.
        epoch: Epoch under which this service runs it.
    """

    training_run: str
    epoch: int


class LeaseState(StrEnum):
    """What a run is for its owners, as in `fulmen.store.v1.RunLeaseState`."""

    IDLE = "IDLE"
    WAITING = "WAITING"
    RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLease:
    """A run and its lease at the store.

    Attributes:
        training_run: `projects/{project}/trainingRuns/{id}`.
        owner: Id of the last owner; empty if it never had one.
        owner_address: `host:port` of the last owner.
        epoch: Newest epoch.
        held_s: Time for which the lease is held from now on unless it is renewed, in seconds; 0 if it is not held.
        record: The run as its owner last described it.
        storage: Id of the storage that holds the run's files.
    """

    training_run: str
    owner: str
    owner_address: str
    epoch: int
    held_s: float
    record: bytes = field(repr=False)
    storage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewal:
    """A lease to renew; an empty record leaves the stored one."""

    fence: RunFence
    record: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as the store records it; fields as in `fulmen.store.v1.RunLease`."""

    training_run: str
    policy: str
    record: bytes


class RunHistory(Protocol):
    """What runs measured, at the store. No call waits for an outage to end."""

    async def append(self, fence: RunFence, events: Sequence[Event], *, rollbacks: Mapping[int, int]) -> int:
        """Appends events under an epoch of a run; returns the sequence of the last event that the store has of it.

        Args:
            fence: The run and its epoch.
            events: Steps, notices, and states that `rollbacks` names; those that the store has are skipped.
            rollbacks: Steps to which events rolled the run back, by sequence.

        Raises:
            RunLeaseLost: if another service has acquired the run, or the store does not know it.
            ArgumentInvalid: if the store keeps no such events.
        """


class RunLeases(Protocol):
    """The leases of runs at the store, for this service. No call waits for an outage to end.

    Every call raises Unavailable or another error of `AWAY` if the store does not answer.
    """

    async def create(self, runs: Sequence[RunRecord], *, request_id: str) -> None:
        """Records a run and the stages that follow it, all or none; `request_id` is that of the first.

        Raises:
            TrainingRunExists: if a name or the request id is taken.
        """

    async def acquire(self, training_run: str, *, after_epoch: int, for_change: bool = False) -> int:
        """Acquires a lease, to run the run or only for a change; returns its epoch, which is greater than `after_epoch`.

        Raises:
            RunLeaseHeld: if another service holds it, or the run is in another storage, or it is to be run and another
                run of its policy is.
            TrainingRunNotFound: if the run is not recorded.
        """

    async def renew(self, renewals: Sequence[LeaseRenewal]) -> set[str]:
        """Renews leases; returns the runs whose leases are lost."""

    async def release(self, fence: RunFence, *, state: LeaseState, record: bytes) -> None:
        """Ends a lease.

        Raises:
            RunLeaseLost: if another service has acquired the run.
        """

    async def changed(self) -> list[RunLease]:
        """Lists the runs whose lease or record has changed since the last call."""


class BaseModels(Protocol):
    """Models that runs may begin with, by their `policy.base`."""

    async def problem(self, source: str, *, project: str) -> str:
        """Returns why no run of a project can begin with a base; empty if one may."""

    async def folder(self, source: str, *, project: str, notify: Notify) -> Path:
        """Returns the folder of a base, downloaded if need be.

        Raises:
            RunFailed: if there is none.
        """


class ResourceStore(Protocol):
    """The resources of one project at the store."""

    async def has_rollouts(self, training_run: str) -> bool:
        """Returns whether a run, of any service, has rollouts."""

    async def get(self, name: str) -> Content:
        """Reads a version.

        Raises:
            ResourceNotFound: if it does not exist.
        """

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Publishes a version, idempotently by `request_id`."""

    async def point(self, resource: str, alias: str, version: int) -> None:
        """Moves an alias of a resource to a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """Weights on disk: complete, adapters, or a delta. The folder is fully written.

    Attributes:
        path: The folder; complete weights are in the format of `transformers`.
        sha256: Of the complete weights, hexadecimal.
        size_bytes: Size of the tensor files.
        kind: Content of the folder.
        full_bytes: Size of the complete weights.
        changed_share: Share of the elements that differ from the base; 1 without a base.
        base: delta: the version it applies to.
        adapters: lora: names of the folders in it.
        merged: lora: a complete folder with the adapter merged, if available.
    """

    path: Path
    sha256: str
    size_bytes: int
    kind: WeightsKind = WeightsKind.FULL
    full_bytes: int = 0
    changed_share: float = 1.0
    base: int = 0
    adapters: tuple[str, ...] = ()
    merged: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """One of the folders from which a version's weights are rebuilt.

    Attributes:
        path: A complete folder, or one with a delta.
        sha256: Of the weights up to this link.
    """

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStats:
    """Cost of replacing the weights of an engine, or of several.

    Attributes:
        pause_s: Longest time of one without sampling, in seconds; 0 for one that was restarted instead.
        size_bytes: Bytes read by all of them.
    """

    pause_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineCount:
    """How many engines serve a policy or are to, and how many of them take calls now."""

    ready: int = 0
    count: int = 0


class Serving(Protocol):
    """Serves one run's policy to agents: its engine and the proxy's route to it."""

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Serves a policy version under the policy's name; `overrides` are JSON fields by mode."""

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Replaces the served weights by another version of the policy."""

    async def sampled_tokens(self) -> int:
        """Returns the tokens sampled from the policy by all callers; never decreases."""

    def release(self) -> None:
        """Marks the run as ended; its policy remains served until the engine is needed elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request to a model.

    Attributes:
        model: The model's name: a route of the LLM proxy, or a model of the endpoint.
        messages: OpenAI chat messages.
        temperature: Sampling temperature; None for the model's default.
        max_tokens: Maximum length of the answer, in tokens.
        base_url: An address of the service's `chat_endpoints`, such as `https://api.example.com/v1`; empty for the
            proxy.
        purpose: Caller, such as `apo.critic`; the call's agent name at the proxy.
    """

    model: str
    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    temperature: float | None = None
    max_tokens: int = 1024
    base_url: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An answer of a model.

    Attributes:
        text: Text of the answer; may be empty.
        prompt_tokens: As counted by the endpoint; 0 if not reported.
        completion_tokens: As counted by the endpoint; 0 if not reported.
    """

    text: str = field(repr=False)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All billed tokens."""
        return self.prompt_tokens + self.completion_tokens


class ChatModels(Protocol):
    """Calls models."""

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Sends a request, waiting while the endpoint limits the rate or is unavailable.

        Raises:
            RunFailed: if the endpoint refuses the request or is unavailable for too long.
        """

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token given those before it, under a model behind the LLM proxy.

        The first is 0.0. The model is a route of the proxy to an engine that scores prompts, at temperature 1.

        Raises:
            RunFailed: if it cannot score these tokens, or is unavailable for too long.
        """
