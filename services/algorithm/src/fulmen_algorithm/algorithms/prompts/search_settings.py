"""Settings and state of searches for a prompt."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from fulmen_algorithm.algorithms.prompts.candidates import Candidate
from fulmen_algorithm.algorithms.sampling import measuring_overrides
from fulmen_algorithm.policy.engine_settings import Address
from fulmen_algorithm.runs.algorithm import RolloutLimits, RunSettings
from fulmen_algorithm.training.strict import NONE_BY_NAME, Strict


class Model(Strict):
    """A model that improves prompts.

    Attributes:
        model: Model name: a route of the LLM proxy, or a model of the endpoint.
        base_url: OpenAI-compatible endpoint, which must be in the service's setting `FULMEN_ALGORITHM_CHAT_ENDPOINTS`;
            empty for the LLM proxy.
        temperature: Sampling temperature; `"none"` for the model's default.
        max_tokens: Maximum length of an answer, in tokens.
    """

    model: str = Field(min_length=1, max_length=200)
    base_url: Literal[""] | Address = ""
    temperature: Annotated[float | None, NONE_BY_NAME] = Field(default=1.0, ge=0, le=2)
    max_tokens: int = Field(default=2048, ge=1, le=1_048_576)


class Budget(Strict):
    """Limits of a search, which ends with its best result when one is reached.

    Attributes:
        calls: Calls of the models that improve prompts.
        tokens: Tokens of those calls, as counted by the endpoint; calls in flight may exceed it.
        rollouts: Rollouts on training tasks.
    """

    calls: int = Field(default=300, ge=1)
    tokens: int = Field(default=2_000_000, ge=1)
    rollouts: int = Field(default=10_000, ge=1)


class SearchSettings(RunSettings):
    """Settings of every search for a prompt.

    Attributes:
        good_reward: Rollouts with at least this reward are not shown to the model that improves the prompt.
        budget: Limits of the search.
        target_reward: Mean reward of the best prompt on training tasks at which the search ends; null for none.
        failure_reward: Reward of a rollout that the agent failed.
        max_prompt_chars: Maximum length of a prompt, in characters.
        temperature: Sampling temperature of the run's policy; calls to other models are not changed.
        max_tokens: Maximum length of an answer of the run's policy, in tokens; null for the agent's own limit.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where the lost one
            was.
    """

    checkpoint_every: int = Field(default=1, ge=1)
    good_reward: float = 1.0
    budget: Budget = Budget()
    target_reward: float | None = None
    failure_reward: float = 0.0
    max_prompt_chars: int = Field(default=20_000, ge=1, le=90_000)
    temperature: float = Field(default=1.0, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)
    rollout_restart_lost: bool = False

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(
            timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts, restart_lost=self.rollout_restart_lost
        )

    @property
    def overrides(self) -> dict[str, dict[str, object]]:
        """Request fields by rollout mode, for the run's policy."""
        return measuring_overrides(temperature=self.temperature, max_tokens=self.max_tokens)


@dataclass(slots=True, kw_only=True)
class SearchState:
    """State of a search, kept in `progress.memory`.

    Attributes:
        candidates: By id, in the order in which they were made.
        beam: Ids, the best first.
        rejected: Unusable edits with reasons.
        journal: Answers in the present round, by question.
        calls: Calls so far.
        tokens: Tokens so far.
        rollouts: Rollouts on training tasks so far.
        same_head: Consecutive rounds with the same best prompt.
        scores: Rewards of candidates on the tasks of the Pareto set, in their order; None where a rollout was lost.
        over: Reason why the search has ended; empty while it runs.
    """

    candidates: dict[str, Candidate]
    beam: list[str]
    rejected: list[dict[str, str]] = field(default_factory=list)
    journal: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    tokens: int = 0
    rollouts: int = 0
    same_head: int = 0
    over: str = ""
    scores: dict[str, list[float | None]] = field(default_factory=dict)

    def as_memory(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {**asdict(self), "candidates": [asdict(c) for c in self.candidates.values()]}

    @classmethod
    def of_memory(cls, memory: Mapping[str, Any]) -> "SearchState":
        """Reads the values of `as_memory`, even after a JSON round trip."""
        made = [Candidate(**{**c, "rewards": tuple(c["rewards"])}) for c in memory["candidates"]]
        return cls(**{**memory, "candidates": {c.id: c for c in made}, "journal": dict(memory["journal"])})
