"""Settings of `apo`."""

from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.algorithms.prompts.search_settings import Model, SearchSettings
from fulmen_algorithm.training.strict import Strict


class Halving(Strict):
    """Successive halving: all candidates run on a minibatch, the worse half is dropped, and so on.

    Attributes:
        tasks: Training tasks of a minibatch.
    """

    kind: Literal["halving"] = "halving"
    tasks: int = Field(default=8, ge=1, le=10_000)


class Ucb(Strict):
    """Upper confidence bounds: each candidate once, then repeatedly the one with the highest bound.

    Attributes:
        tasks: Training tasks of a minibatch.
        pulls: Minibatches of a round; at least one per candidate is used.
        exploration: Weight of the confidence bound, in units of reward.
    """

    kind: Literal["ucb"]
    tasks: int = Field(default=4, ge=1, le=10_000)
    pulls: int = Field(default=32, ge=1, le=100_000)
    exploration: float = Field(default=0.5, ge=0)


class ApoSettings(SearchSettings):
    """Settings of `apo`, in addition to those of every search for a prompt.

    Attributes:
        steps: Rounds of the search.
        critic: Model that criticises a prompt, such as `{model = "gpt-x"}`.
        editor: Model that rewrites it; null for the critic.
        beam_width: Number of prompts kept after a round.
        branch_factor: Edits per prompt and round.
        paraphrases: Paraphrases of each edit that become candidates, as in the paper; each needs a call and rollouts.
        concurrency: Edits requested concurrently; a killed process loses at most this many answers.
        gradient_tasks: Training tasks on which a prompt is run to find its weaknesses.
        gradient_examples: Number of these tasks shown in one criticism.
        selection: Selection of the beam: `{kind = "halving", tasks = 8}` or `{kind = "ucb", pulls = 32}`.
        patience: Rounds with the same best prompt after which the search ends; 0 for no limit.
    """

    steps: int = Field(default=3, ge=1, le=1000)
    critic: Model
    editor: Model | None = None
    beam_width: int = Field(default=4, ge=1, le=64)
    branch_factor: int = Field(default=4, ge=1, le=64)
    paraphrases: int = Field(default=0, ge=0, le=16)
    concurrency: int = Field(default=4, ge=1, le=64)
    gradient_tasks: int = Field(default=8, ge=1, le=10_000)
    gradient_examples: int = Field(default=4, ge=1, le=64)
    selection: Annotated[Halving | Ucb, Field(discriminator="kind")] = Halving()
    patience: int = Field(default=2, ge=0)

    @property
    def endpoints(self) -> dict[str, str]:
        """Endpoints of critic and editor."""
        models = {"critic": self.critic, "editor": self.editor}
        return {name: model.base_url for name, model in models.items() if model is not None and model.base_url}
