# ruff: noqa: N806 (tensor names end with their shape)
"""The policy: a causal language model, its tokenizer, and its log-probabilities for training.

Invariant: weights are float32, logits are normalised in float32, and log-probabilities are those of the distribution at
the sampling temperature, for any precision of the passes and any number of ranks.

Legend: B lines, T positions, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2
from fulmen_algorithm.training.packing import MicroBatch
from fulmen_algorithm.training.parallel import autocast, shard, spread_again, wants_bf16
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.scorer import TokenScorer, checkpoint_layers, layers_of, try_out
from fulmen_algorithm.training.settings import LoraSettings, OptimizerSettings, PackingMode, Sgd
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.tensor_files import WEIGHTS_FILE
from fulmen_algorithm.weights.weight_writer import WeightWriter, published_tensors
from fulmen_exchange.ranks import Ranks

if TYPE_CHECKING:
    from fulmen_algorithm.weights.lora import Adapters


class PolicyModel:
    """A model and its tokenizer, on one device or spread over ranks."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, lora: LoraSettings | None = None
    ) -> None:
        """Wraps a loaded model; dropout is off, because the sampler knows none. With `lora` it gets fresh adapters."""
        self.adapters = _adapters(model, lora) if lora is not None else None
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.ranks = Ranks(device=model.device)
        traits = try_out(model)
        self._packs = traits.packs
        self._scorer = TokenScorer(model, traits)
        self._bf16 = False
        self._sharded = False
        self._writer = WeightWriter()

    @classmethod
    def load(cls, model_dir: Path | str, *, device: str = "cpu", lora: LoraSettings | None = None) -> "PolicyModel":
        """Loads a model directory in float32; nothing is downloaded.

        Raises:
            OSError: if the directory holds no model or no tokenizer.
            TargetsUnknown: if the model has none of the modules that are to get adapters, or one is no linear layer.
        """
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        model.to(device)  # type: ignore[arg-type]  # the library's wrapper hides the signature
        return cls(model, tokenizer, lora=lora)

    def prepare(self, compute: ComputeSettings, ranks: Ranks) -> None:
        """Prepares the model for training by some ranks; called once by each, before an optimiser is built.

        The weights may be on the CPU still if they are to be spread over the ranks.
        """
        self.ranks = ranks
        self._bf16 = wants_bf16(compute, ranks.device)
        if compute.gradient_checkpointing:
            checkpoint_layers(self.model)
        if isinstance(compute.parallel, Fsdp2):
            shard(self._scorer, layers_of(self.model), ranks, compute.parallel, bf16=self._bf16)
            self._sharded = True

    def save(self, model_dir: Path | str, *, tokenizer: bool = True) -> None:
        """Writes the trained weights, a model folder or a folder of adapters; complete when this returns.

        All ranks call it, and rank 0 writes.
        """
        weights = _whole_weights(self.model) if self.sharded else None
        if not self.ranks.leads:
            return
        if self.adapters is not None:
            self.adapters.write(Path(model_dir), weights)
        else:
            self.model.save_pretrained(model_dir, safe_serialization=True, state_dict=weights)
        if tokenizer:
            self.tokenizer.save_pretrained(model_dir)

    def publish(self, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
        """Writes the present weights for engines: complete, as a delta, or as adapters.

        All ranks call it; only rank 0 writes and gets a result.
        """
        weights = _whole_weights(self.model) if self.sharded else None
        if not self.ranks.leads:
            return None
        if self.adapters is not None and not order.merged:
            return self.adapters.write(folder, weights)
        if self.adapters is not None:
            earlier = self.adapters.read(Path(order.adapters)) if order.adapters else {}
            tensors = self.adapters.merged(self.adapters.names[0], weights, earlier)
        else:
            tensors = published_tensors(self.model)
            if weights is not None:
                tensors = {name: weights[name] for name in tensors}
        return self._writer.write(tensors, self.save_tensors, folder, order)

    def save_tensors(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes a model folder with these tensors instead of the model's own."""
        if self.adapters is None:
            self.model.save_pretrained(folder, safe_serialization=True, state_dict=dict(tensors))
        else:
            # The library would write the adapters.
            folder.mkdir(parents=True)
            self.model.config.save_pretrained(folder)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(folder)
            own = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(own, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self.tokenizer.save_pretrained(folder)

    def adapter_of(self, row: Row) -> str:
        """Returns the adapter that a row trains; empty if the weights themselves train.

        Raises:
            UnknownRole: if adapters are by role and the row's role has no adapter.
        """
        return "" if self.adapters is None else self.adapters.of_role(row.role)

    def use_adapter(self, name: str) -> None:
        """Activates an adapter; empty if the weights themselves train."""
        if self.adapters is not None:
            self.adapters.use(name)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.ranks.device

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded, so that every pass involves all ranks."""
        return self._sharded

    def packing(self, wanted: PackingMode) -> PackingMode:
        """Returns the packing mode: as wanted, unless the model would mix rows of a line."""
        return wanted if self._packs else PackingMode.PADDED

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

    def token_logprobs(self, batch: MicroBatch, *, temperature: float = 1.0, trained_only: bool = False) -> Tensor:
        """Computes the log-probability of every token given those before it in its row.

        Args:
            batch: Padded or packed micro-batch.
            temperature: Sampling temperature, > 0; logits are divided by it.
            trained_only: Whether to compute only the trained tokens; others are 0.0 and need no logits.

        Returns:
            float32 [B, T]; position t holds log p(token t | tokens before t); the first of a row is meaningless, and
            0.0 at t = 0.
        """
        ids_BT = batch.input_ids_BT.to(self.device)
        asked_BT = batch.loss_mask_BT.to(self.device) if trained_only else torch.ones_like(ids_BT, dtype=torch.bool)
        attention = batch.attention_mask_BT
        if self.adapters is not None:
            self.adapters.drop_out(torch.is_grad_enabled())
        with autocast(self.device, bf16=self._bf16 and not self.sharded):
            logprobs_BT: Tensor = self._scorer(
                ids_BT,
                batch.position_ids_BT.to(self.device),
                None if attention is None else attention.to(self.device),
                asked_BT,
                temperature,
            )
        if self.sharded and not torch.is_grad_enabled():
            # The root keeps its weights gathered for a backward pass, but there is no backward pass here.
            spread_again(self._scorer)
        return logprobs_BT


def _adapters(model: PreTrainedModel, settings: LoraSettings) -> "Adapters":
    # Imported late: peft takes half a second to import, on every rank.
    from fulmen_algorithm.weights.lora import Adapters

    return Adapters(model, settings)


def _whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gathers sharded weights on the CPU of rank 0; tied weights once, as in files."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    whole = get_model_state_dict(model, options=options)
    return {name: value for name, value in whole.items() if name not in tied and isinstance(value, Tensor)}


def make_optimizer(policy: PolicyModel, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Builds the optimiser over all parameters; with AdamW, matrices decay and vectors (norms, biases) do not."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    rule = settings.rule
    if isinstance(rule, Sgd):
        return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=rule.momentum)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=settings.learning_rate,
        betas=(rule.beta1, rule.beta2),
        eps=rule.epsilon,
    )
