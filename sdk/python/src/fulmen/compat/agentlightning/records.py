"""Agent Lightning 0.3's records, as agents and their functions see them.

Invariant: names and fields are theirs; constructors take the same keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

__all__ = [
    "LLM",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "Hook",
    "NamedResources",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRawResult",
    "SpanCoreFields",
    "TaskInput",
    "TraceStatus",
    "Triplet",
]

T_co = TypeVar("T_co", covariant=True)

RolloutMode: TypeAlias = Literal["train", "val", "test"]
TaskInput: TypeAlias = Any
RolloutRawResult: TypeAlias = Any
"""What a rollout returns: None, a reward, or a list of spans."""


class Dataset(Protocol[T_co]):
    """Tasks by index."""

    def __getitem__(self, index: int) -> T_co:
        """Returns a task."""
        ...

    def __len__(self) -> int:
        """Returns the number of tasks."""
        ...


class Hook:
    """Base of hooks of their runner; on Fulmen hooks belong to the operator (docs/hooks.md) and are not called."""


@dataclass(kw_only=True)
class Resource:
    """A tunable resource."""

    resource_type: str = ""


@dataclass(kw_only=True)
class LLM(Resource):
    """A model that the agent calls.

    Attributes:
        endpoint: Base URL for an OpenAI client.
        model: The model's name.
        api_key: The attempt key; secret.
        sampling_parameters: Such as temperature.
    """

    endpoint: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    resource_type: str = "llm"

    def get_base_url(self, *_: Any, **__: Any) -> str:
        """Returns the endpoint: attempts are distinguished by their keys, not by URLs."""
        return self.endpoint


@dataclass(kw_only=True)
class ProxyLLM(LLM):
    """A model behind a proxy; the same as `LLM` here, since every model is behind Fulmen's."""

    resource_type: str = "proxy_llm"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Returns the model for one attempt."""
        del rollout
        return LLM(
            endpoint=self.endpoint,
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


@dataclass(kw_only=True)
class PromptTemplate(Resource):
    """A prompt that is tuned.

    Attributes:
        template: Its text.
        engine: `f-string`, `jinja` or `poml`.
    """

    template: str
    engine: str
    resource_type: str = "prompt_template"

    def format(self, **kwargs: Any) -> str:
        """Returns the prompt with values for its placeholders.

        Raises:
            NotImplementedError: If the engine is not `f-string`, as in theirs.
        """
        if self.engine != "f-string":
            raise NotImplementedError(f"Prompts of the engine {self.engine!r} are formatted by the agent itself.")
        return self.template.format(**kwargs)


NamedResources: TypeAlias = dict[str, Any]


@dataclass(kw_only=True)
class RolloutConfig:
    """Retries and timeouts; on Fulmen `rollout_attempts` and `rollout_timeout_s` of the algorithm."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Attempt:
    """An attempt. Times are seconds since the epoch."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    start_time: float
    end_time: float | None = None
    status: str = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Rollout:
    """A rollout. Times are seconds since the epoch."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: str = "queuing"
    config: RolloutConfig = field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class AttemptedRollout(Rollout):
    """A rollout with the attempt that works on it."""

    attempt: Attempt


@dataclass(kw_only=True)
class TraceStatus:
    """Status of a span: UNSET, OK or ERROR."""

    status_code: str = "UNSET"
    description: str | None = None


@dataclass(kw_only=True)
class SpanCoreFields:
    """A span without its place in a trace. Times are seconds since the epoch."""

    name: str
    status: TraceStatus
    attributes: dict[str, Any]
    start_time: float | None = None
    end_time: float | None = None


@dataclass(kw_only=True)
class Triplet:
    """One model call: prompt, response and reward.

    Attributes:
        prompt: `token_ids`, and what was recorded of the request.
        response: `token_ids`, and what was recorded of the answer.
        reward: The reward matched with the call, or None.
        metadata: Id of the answer, and the agent's name.
    """

    prompt: dict[str, Any]
    response: dict[str, Any]
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


Spans: TypeAlias = Sequence[Any]
