"""On-policy distillation: the policy samples, and a teacher computes for each token how likely it would have been.

A run of `grpo` whose rewards train nothing, so tasks need no grader; with one, rewards are measured. The teacher's
setting is also one of every other policy-gradient algorithm, where its signal adds to that of the rewards.
"""

from pydantic import Field

from fulmen_algorithm.algorithms.grpo import Grpo, GrpoSettings
from fulmen_algorithm.algorithms.options.teacher_settings import TeacherSettings
from fulmen_algorithm.losses.advantage_settings import AdvantageSettings, NoAdvantage
from fulmen_algorithm.runs.algorithm import AlgorithmEntry


class DistillSettings(GrpoSettings):
    """Settings of `distill` (arXiv:2306.13649): a teacher scores each token that the policy samples, and no reward is
    needed.

    Attributes:
        teacher: `model`, served behind the LLM proxy, or `self`, the policy's own weights with a hint.
        advantage: `none`: only the teacher's signal. With another estimator the rewards are used, too.
        group_size: Rollouts per task; they are not compared.
    """

    teacher: TeacherSettings
    advantage: AdvantageSettings = NoAdvantage()
    group_size: int = Field(default=4, ge=1, le=1000)


ENTRIES = (
    AlgorithmEntry(
        name="distill",
        settings=DistillSettings,
        make=Grpo,
        needs=("agent", "train_tasks"),
        takes=("validation_tasks",),
    ),
)
