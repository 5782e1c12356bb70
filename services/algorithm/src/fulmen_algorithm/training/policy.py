# ruff: noqa: N806 (tensor names end with their shape)
"""The policy: a causal language model, its tokenizer, and the log-probabilities that training needs of it.

Invariant: weights are float32 on CPU, logits are float32 everywhere, and log-probabilities are those of the
distribution at the sampling temperature.

Legend: B lines, T positions, V vocabulary.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from fulmen_algorithm.training.packing import MicroBatch


class Schedule(StrEnum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
        schedule: Shape after the warm-up.
        warmup_steps: Optimiser steps of linear warm-up from 0.
        total_steps: Optimiser steps at which a linear or cosine schedule reaches 0; not used by a constant one.
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int | None = None


class PolicyModel:
    """A model and its tokenizer, on one device."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Wraps a loaded model; dropout is off, because the sampler knows none."""
        self.model = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, model_dir: Path | str, *, device: str = "cpu") -> "PolicyModel":
        """Loads a model directory in float32; nothing is downloaded.

        Raises:
            OSError: if the directory holds no model or no tokenizer.
        """
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        model.to(device)  # type: ignore[arg-type]  # the library's wrapper hides the signature
        return cls(model, tokenizer)

    def save(self, model_dir: Path | str) -> None:
        """Writes config, safetensors weights and tokenizer; the directory is complete when this returns."""
        self.model.save_pretrained(model_dir, safe_serialization=True)
        self.tokenizer.save_pretrained(model_dir)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    @property
    def pad_token_id(self) -> int:
        """Id for padding; the end-of-sequence id where the tokenizer has no padding token.

        Raises:
            ValueError: if the tokenizer has neither.
        """
        for candidate in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if candidate is not None:
                return int(candidate)
        raise ValueError("The tokenizer has neither a padding nor an end-of-sequence token.")

    def token_logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """Computes the log-probability of every token given those before it in its row.

        Args:
            batch: Padded or packed micro-batch.
            temperature: Sampling temperature, > 0; logits are divided by it.

        Returns:
            float32 [B, T]; position t holds log p(token t | tokens before t); the first of a row is meaningless, and
            0.0 at t = 0.
        """
        output = self.model(
            input_ids=batch.input_ids_BT.to(self.device),
            position_ids=batch.position_ids_BT.to(self.device),
            attention_mask=None if batch.attention_mask_BT is None else batch.attention_mask_BT.to(self.device),
            use_cache=False,
        )
        logits_BTV = output.logits[:, :-1].float() / temperature
        targets_BT1 = batch.input_ids_BT[:, 1:, None].to(self.device)
        picked_BT = torch.gather(logits_BTV.log_softmax(-1), -1, targets_BT1).squeeze(-1)
        return torch.nn.functional.pad(picked_BT, (1, 0))


def make_optimizer(policy: PolicyModel, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Builds AdamW over all parameters; matrices decay, vectors (norms, biases) do not."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def make_schedule(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> torch.optim.lr_scheduler.LambdaLR:
    """Builds the learning-rate schedule; one step of it follows each optimiser step.

    Raises:
        ValueError: if a schedule that decays lacks `total_steps`.
    """
    if settings.schedule is Schedule.CONSTANT:
        return get_constant_schedule_with_warmup(optimizer, settings.warmup_steps)
    if settings.total_steps is None:
        raise ValueError(f"A {settings.schedule} schedule needs total_steps.")
    if settings.schedule is Schedule.LINEAR:
        return get_linear_schedule_with_warmup(optimizer, settings.warmup_steps, settings.total_steps)
    return get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, settings.total_steps)


def seed_everything(seed: int) -> None:
    """Seeds the process-wide generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
