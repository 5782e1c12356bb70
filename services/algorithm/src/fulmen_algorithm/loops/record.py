"""Trainers as values: what one was created with, and how far it has come."""

import hashlib
import json
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from fulmen_algorithm.runs.run import PolicySpec
from fulmen_algorithm.training.primitives_settings import AdamStep
from fulmen_algorithm.training.settings import LoraSettings
from fulmen_algorithm.training.strict import Strict


class AdamSettings(Strict):
    """Settings of AdamW; see `AdamSettings` in trainer_service.proto."""

    learning_rate: float | None = Field(default=None, gt=0, le=1e3, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1e3, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e30, allow_inf_nan=False)

    def step(self, *, divisor: float) -> AdamStep:
        """Returns one step's settings; the learning rate is set."""
        assert self.learning_rate is not None
        return AdamStep(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm or float("inf"),
            divisor=divisor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDraft:
    """A requested trainer; fields as in `CreateTrainerRequest`.

    Attributes:
        policy: Policy and first weights; without a name with a checkpoint that has one.
        lora: Adapters; None to train all weights.
        autosave_steps: Steps between saves; None for the default.
        checkpoint: Name of the checkpoint to begin with; empty for none.
    """

    project: str
    policy: PolicySpec
    lora: LoraSettings | None = None
    adam: AdamSettings = AdamSettings()  # noqa: RUF009  (it never changes)
    seed: int = 0
    autosave_steps: int | None = None
    checkpoint: str = ""
    request_id: str = ""

    @property
    def digest(self) -> str:
        """Digest of everything but the request id."""
        policy = [self.policy.name, self.policy.origin.value, self.policy.source]
        lora = "" if self.lora is None else self.lora.model_dump_json()
        parts = [
            self.project,
            policy,
            lora,
            self.adam.model_dump_json(),
            self.seed,
            self.autosave_steps,
            self.checkpoint,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A published version whose weights are kept.

    Attributes:
        name: `resources/policy.{policy}/versions/{n}`.
        number: The number in the name.
        request_id: What it was published by.
        folders: Its folders.
    """

    name: str
    number: int
    request_id: str
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """A trainer, as stored.

    Attributes:
        name: `projects/{project}/trainers/{id}`.
        policy: Policy and first weights.
        base: Folder of the first weights.
        created_s: Unix time.
        request_digest: Digest of its request.
        max_tokens: Longest row, in tokens.
        vocabulary: Number of token ids.
        published: Versions whose weights are kept, oldest first.
    """

    name: str
    policy: PolicySpec
    base: str
    lora: LoraSettings | None
    adam: AdamSettings
    seed: int
    autosave_steps: int
    created_s: float
    request_id: str = ""
    request_digest: str = ""
    max_tokens: int = 0
    vocabulary: int = 0
    published: tuple[PublishedWeights, ...] = ()

    @property
    def project(self) -> str:
        """`projects/{project}`."""
        return self.name.partition("/trainers/")[0]

    @property
    def id(self) -> str:
        """The id in the name."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a trainer has come.

    Attributes:
        sequence: Number of the last call that changed it.
        step: Optimizer steps taken.
        weight_sum: Sum of the weights of all tokens since the last step.
        digest: Digest of the last call that changed it.
        answer: Its answer.
    """

    sequence: int = 0
    step: int = 0
    weight_sum: float = 0.0
    digest: str = ""
    answer: bytes = b""

    def as_json(self) -> dict[str, object]:
        """Returns everything but the answer."""
        return {"sequence": self.sequence, "step": self.step, "weight_sum": self.weight_sum, "digest": self.digest}

    @classmethod
    def read(cls, saved: dict[str, object], answer: bytes) -> Self:
        """Reads what `as_json` returned."""
        return cls(
            sequence=int(str(saved["sequence"])),
            step=int(str(saved["step"])),
            weight_sum=float(str(saved["weight_sum"])),
            digest=str(saved["digest"]),
            answer=answer,
        )
