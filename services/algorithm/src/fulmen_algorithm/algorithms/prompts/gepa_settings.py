"""Settings of `gepa`."""

from pydantic import Field

from fulmen_algorithm.algorithms.prompts.search_settings import Model, SearchSettings


class GepaSettings(SearchSettings):
    """Settings of `gepa`, in addition to those of every search for a prompt.

    Attributes:
        steps: Proposals: each is one call of the reflector, and at most one new candidate.
        reflector: Model that reads traces and writes a better prompt, such as `{model = "gpt-x"}`.
        pareto_tasks: Training tasks on which every accepted prompt is measured.
        minibatch_tasks: Training tasks on which a proposal must be better than the prompt that it is made of.
        merge_every: Steps from one merge of two prompts of the front to the next; 0 for none.
    """

    steps: int = Field(default=20, ge=1, le=10_000)
    reflector: Model
    pareto_tasks: int = Field(default=16, ge=1, le=10_000)
    minibatch_tasks: int = Field(default=3, ge=1, le=1000)
    merge_every: int = Field(default=5, ge=0)

    @property
    def endpoints(self) -> dict[str, str]:
        """Endpoint of the reflector."""
        return {"reflector": self.reflector.base_url} if self.reflector.base_url else {}
