"""Settings of a teacher, whose opinion of each sampled token trains the policy. Importable without torch."""

from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.training.strict import Strict


class NoTeacher(Strict):
    """No teacher."""

    kind: Literal["none"] = "none"


class ServedTeacher(Strict):
    """A model behind the LLM proxy that scores the policy's tokens: on-policy distillation.

    Adds coefficient * (log teacher - log mu) to the advantage of each sampled token, mu being the policy that sampled
    it: minus the reverse KL of the token, whose policy gradient is that of KL(policy || teacher) per token.

    Attributes:
        model: Name of the model: a route of the LLM proxy to a vLLM or embedded engine. It must have the tokenizer of
            the policy.
        coefficient: Weight of the teacher's signal.
        concurrency: Rows that are scored concurrently.

    Source: "On-policy distillation" (Thinking Machines, 2025); GKD (arXiv:2306.13649) section 3, on-policy with the
    reverse KL; MiniLLM (arXiv:2306.08543) eq. 1.
    """

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1, max_length=256)
    coefficient: float = Field(default=1.0, gt=0)
    concurrency: int = Field(default=16, ge=1, le=1024)


class SelfTeacher(Strict):
    """The policy's own weights, which read a hint before the conversation: on-policy self-distillation.

    The signal is that of `model`, of a teacher that reads a system message with the hint before the tokens of the row.
    Rollouts of tasks without the hint get none.

    Attributes:
        hint: Key of the task whose text is the hint, such as the solution.
        weights: `initial` for frozen initial weights, or `present` for the current weights at the start of each step.
        coefficient: Weight of the teacher's signal.

    Source: "Self-distillation enables continual learning" (Shenfeld et al., arXiv:2601.19897) with the reverse KL; its
    demonstration is the hint here.
    """

    kind: Literal["self"] = "self"
    hint: str = Field(min_length=1, max_length=256)
    weights: Literal["initial", "present"] = "initial"
    coefficient: float = Field(default=1.0, gt=0)


TeacherSettings = Annotated[NoTeacher | ServedTeacher | SelfTeacher, Field(discriminator="kind")]


def teacher_conflict(teacher: TeacherSettings, scoring: ScoringSettings, temperature: float) -> str:
    """Returns every reason why a run cannot have the teacher; empty if it can."""
    advantage = scoring.advantage.kind
    if isinstance(teacher, NoTeacher):
        return "advantage: none leaves no training signal: set a teacher" if advantage == "none" else ""
    found = []
    if advantage == "gae":
        found.append("teacher: gae computes advantages from rewards in the trainer, which has no teacher")
    if isinstance(teacher, ServedTeacher) and temperature != 1.0:
        found.append("teacher: engines score tokens at temperature 1, so temperature must be 1 with kind model")
    return "; ".join(found)
