"""Settings of the order in which tasks are tried. Importable without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fulmen_algorithm.training.strict import Strict


class NoCurriculum(Strict):
    """Every task once per epoch, in a new seeded order."""

    kind: Literal["none"] = "none"


class DifficultyCurriculum(Strict):
    """Skips tasks that are solved, and tries those that are nearly solved more often.

    The success of a task is the mean of its newest group, each reward scaled to 0 at `failed` and 1 at `solved`. A task that
    every rollout of its group solved is skipped: for 1 epoch, then for 2, 4 and so on, up to `rest`, as long as it is solved
    again each time. Its places, and a share `retry` of the places of other tasks that were tried before, are given to tasks that
    are not skipped, drawn in proportion to p (1 - p) of their success p, by the rule of succession. A task that was never tried
    keeps its place.

    Attributes:
        failed: Reward at which a rollout counts as failed.
        solved: Reward at which a rollout has solved its task.
        rest: Maximum number of epochs for which a task is skipped.
        retry: Share of the places of tried tasks that is also given to tasks drawn by difficulty.
        run: Id of an earlier run of the project, whose rollouts show the difficulty of the same tasks; empty for none.

    Source: learnability p (1 - p) as in Rutherford et al. (arXiv:2408.15099) and Foster et al. (arXiv:2502.12272); growing
    intervals as in spaced repetition.
    """

    kind: Literal["difficulty"] = "difficulty"
    failed: float = 0.0
    solved: float = 1.0
    rest: int = Field(default=8, ge=1, le=1_000_000)
    retry: float = Field(default=0.25, ge=0, le=1)
    run: str = Field(default="", pattern="^[a-z0-9-]{0,63}$")

    @model_validator(mode="after")
    def _rewards_in_order(self) -> "DifficultyCurriculum":
        if self.failed >= self.solved:
            raise ValueError("failed must be less than solved")
        return self

    def success(self, reward: float) -> float:
        """Scales a reward to 0 at `failed` and 1 at `solved`, within these."""
        return min(max((reward - self.failed) / (self.solved - self.failed), 0.0), 1.0)


CurriculumSettings = Annotated[NoCurriculum | DifficultyCurriculum, Field(discriminator="kind")]
