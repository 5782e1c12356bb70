"""How much memory a training needs, by part. Bytes are per GPU; the formulas name their sources.

All tensors that grow with the model or the batch are counted. Memory that libraries reserve is a flat allowance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fulmen_cli.model.shape import ModelShape

__all__ = [
    "EnginePlan",
    "OptimizerKind",
    "Part",
    "TrainingPlan",
    "activation_bytes_per_token",
    "engine_parts",
    "logits_bytes",
    "total_bytes",
    "training_parts",
]

OptimizerKind = Literal["adamw", "muon", "sgd"]
"""What the trainer offers (`UpdateRule` of the algorithm service, which need not be installed here)."""

FLOAT32: Final = 4
BFLOAT16: Final = 2
LOGITS_AT_ONCE: Final = 2**25
LIBRARY_BYTES: Final = 2**30
"""Allowance for one process: the context of CUDA, kernels, and the allocator's rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory: what for, bytes, and how it comes about."""

    name: str
    size_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How a model is trained.

    Attributes:
        gpus: GPUs over which `fsdp2` and `tensor` spread one copy of the weights; 1 for one process.
        lora_rank: Rank of the adapters; 0 trains all weights.
        batch_tokens: Positions of a micro-batch, `token_budget`.
        trained_share: Share of the positions whose log-probabilities are computed.
        checkpointing: Whether `gradient_checkpointing` is on.
        optimizer: The update rule.
        momentum: Momentum of SGD; 0 for none.
        reference: Whether a second copy of the weights is held for a KL penalty.
        critic: Whether a critic is trained on the same GPUs.
        tensor: GPUs of these that compute the same rows together, each with a part of the matrices.
        context: GPUs that compute the same rows together, each a part of the positions.
        plain_head: Whether logits are the head's result alone, and so are computed in pieces.
    """

    gpus: int = 1
    lora_rank: int = 0
    batch_tokens: int = 8192
    trained_share: float = 1.0
    checkpointing: bool = False
    optimizer: OptimizerKind = "adamw"
    momentum: float = 0.0
    reference: bool = False
    critic: bool = False
    tensor: int = 1
    context: int = 1
    plain_head: bool = True

    @property
    def own_tokens(self) -> int:
        """Positions of a micro-batch that a GPU computes."""
        return -(-self.batch_tokens // self.context)

    def held(self, shape: ModelShape) -> int:
        """Returns how many of the model's parameters a GPU holds."""
        split = shape.split_parameters
        return (split // self.tensor + shape.parameters - split) // (self.gpus // self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How a model is served.

    Attributes:
        gpus: GPUs over which matrices and heads are split, `tensor_parallel`.
        nodes: Machines over which layers are split, each with so many GPUs.
        sequences: Concurrent calls.
        length: Tokens of a call, prompt and answer together.
        number_bytes: Bytes of a weight, and of a number in the cache.
    """

    gpus: int = 1
    nodes: int = 1
    sequences: int = 64
    length: int = 4096
    number_bytes: int = BFLOAT16


def training_parts(shape: ModelShape, plan: TrainingPlan) -> list[Part]:
    """Returns the memory of the trainer on one GPU, in bf16 with weights and moments in float32 (docs/parallel.md).

    Weights, gradients and moments are 16 bytes per parameter with AdamW, as in mixed-precision training of the ZeRO paper
    (arXiv:1910.02054, section 3.1), but gradients are float32 and the copy in bf16 exists only for a pass. With `fsdp2`
    each GPU holds its share (ZeRO stage 3, section 5) and one gathered layer, with the next one under way. With `tensor` it
    has its part of the matrices of every layer (arXiv:1909.08053, section 3), and of what is inside of attention and MLPs.
    """
    adapters = (shape.adapter_parameters(plan.lora_rank) if plan.lora_rank else 0) // plan.gpus
    whole = plan.held(shape)
    trained = adapters or whole
    parts = [
        Part(name="weights", size_bytes=FLOAT32 * (whole + adapters), reason="4 bytes per parameter"),
        Part(name="gradients", size_bytes=FLOAT32 * trained, reason="4 bytes per trained parameter"),
        _moments(shape, plan, trained),
        Part(name="working copy", size_bytes=_working_copy(shape, plan), reason="weights in bf16 during a pass"),
        Part(name="activations", size_bytes=_activations(shape, plan), reason=f"{plan.own_tokens} positions"),
        Part(
            name="logits",
            size_bytes=logits_bytes(shape, plan),
            reason="in pieces of 2^25" if plan.plain_head else "of a whole micro-batch",
        ),
    ]
    if adapters:
        parts.insert(1, Part(name="adapters", size_bytes=FLOAT32 * adapters, reason=f"rank {plan.lora_rank}"))
        parts[0] = Part(name="weights", size_bytes=FLOAT32 * whole, reason="4 bytes per parameter, frozen")
    if plan.reference:
        parts.append(Part(name="reference", size_bytes=FLOAT32 * whole, reason="the first weights, for a KL"))
    if plan.critic:
        head = 0 if shape.tied else shape.vocabulary * shape.hidden // (plan.gpus // plan.tensor)
        reason = "weights, gradients and AdamW's moments: 16 bytes per parameter"
        parts.append(Part(name="critic", size_bytes=4 * FLOAT32 * (whole - head), reason=reason))
    return [*parts, Part(name="libraries", size_bytes=LIBRARY_BYTES, reason="an allowance")]


def engine_parts(shape: ModelShape, plan: EnginePlan) -> list[Part]:
    """Returns the memory of a vLLM engine on one GPU.

    A token in the cache has a key and a value of every layer: 2 · L · key heads · head · 2 bytes (arXiv:2309.06180,
    section 3). Heads of keys are split over GPUs as far as there are some for each.
    """
    split = min(plan.gpus, shape.key_heads)
    token_bytes = 2 * shape.layers * shape.key_heads * shape.head * plan.number_bytes
    tokens = plan.sequences * plan.length
    return [
        Part(
            name="engine's weights",
            size_bytes=plan.number_bytes * shape.parameters // (plan.gpus * plan.nodes),
            reason=f"{plan.number_bytes} bytes per parameter",
        ),
        Part(
            name="engine's cache",
            size_bytes=token_bytes * tokens // (split * plan.nodes),
            reason=f"{plan.sequences} calls of {plan.length} tokens",
        ),
        Part(name="engine's libraries", size_bytes=LIBRARY_BYTES, reason="an allowance"),
    ]


def total_bytes(parts: list[Part]) -> int:
    """Returns the sum of some parts."""
    return sum(part.size_bytes for part in parts)


def activation_bytes_per_token(shape: ModelShape, tensor: int = 1) -> int:
    """Returns what one layer keeps of one position for the backward pass, in bf16 with attention that keeps no scores.

    Counted tensor by tensor as in arXiv:2205.05198, section 4.1, for the layers of `transformers` under autocast: norms
    compute in float32 and keep two tensors; each linear layer keeps a bf16 copy of its input. Experts are counted as so many
    MLPs.
    """
    wide, queries, keys = shape.hidden, shape.heads * shape.head, shape.key_heads * shape.head
    norms = 2 * 2 * FLOAT32 * wide
    inputs = (3 + (2 if shape.gated else 1) * (shape.active_experts or 1)) * BFLOAT16 * wide
    attention = (2 * queries + 2 * keys) * BFLOAT16
    head_norms = (FLOAT32 + BFLOAT16) * (queries + keys) if shape.head_norms else 0
    mlp = (4 if shape.gated else 2) * BFLOAT16 * shape.inner * (shape.active_experts or 1)
    return norms + inputs + (attention + head_norms + mlp) // tensor


def _activations(shape: ModelShape, plan: TrainingPlan) -> int:
    per_token = activation_bytes_per_token(shape, plan.tensor)
    stream = FLOAT32 * shape.hidden
    gathered, mask = _gathered_bytes(shape, plan)
    if plan.checkpointing:
        # The input of each layer, and one layer's inside while it is computed again (arXiv:1604.06174).
        return plan.own_tokens * (stream * shape.layers + per_token) + gathered + mask
    return (plan.own_tokens * per_token + gathered) * shape.layers + mask


def _gathered_bytes(shape: ModelShape, plan: TrainingPlan) -> tuple[int, int]:
    """Returns what `context` adds: to each layer its keys and values up to the ends of a GPU's two chunks, and their mask.

    Keys and values are repeated for every head of queries, since attention has a mask (arXiv:2407.21783, section 3.3.2).
    """
    if plan.context == 1:
        return 0, 0
    chunk = plan.batch_tokens // (2 * plan.context)
    attended = (2 * plan.context + 1) * chunk
    return attended * 2 * shape.heads * shape.head * BFLOAT16, attended * chunk * BFLOAT16


def _working_copy(shape: ModelShape, plan: TrainingPlan) -> int:
    """Weights in bf16: of all layers, since the backward pass needs them; of two where they are gathered or made again."""
    embeddings = shape.vocabulary * shape.hidden
    if plan.gpus > plan.tensor or plan.checkpointing:
        return BFLOAT16 * (2 * shape.layer_parameters // plan.tensor + embeddings * (1 if shape.tied else 2))
    return BFLOAT16 * plan.held(shape)


def logits_bytes(shape: ModelShape, plan: TrainingPlan) -> int:
    """Returns the memory of logits: of one piece, or of all positions, in bf16 and in float32, with the gradients of both.

    Source: `training/scorer.py` of the algorithm service.
    """
    numbers = int(plan.own_tokens * plan.trained_share) * shape.vocabulary
    return (min(numbers, LOGITS_AT_ONCE) if plan.plain_head else numbers) * 2 * (BFLOAT16 + FLOAT32)


def _moments(shape: ModelShape, plan: TrainingPlan, trained: int) -> Part:
    """Returns what the optimiser keeps of the trained parameters (`training/optimizers.py` of the algorithm service)."""
    match plan.optimizer:
        case "sgd" if plan.momentum:
            size_bytes, reason = FLOAT32 * trained, "4 bytes per trained"
        case "sgd":
            size_bytes, reason = 0, "none without momentum"
        case "muon":
            # One momentum; parameters that are not matrices of a layer are trained by AdamW. Muon only trains whole
            # models on one GPU.
            size_bytes = FLOAT32 * (2 * trained - shape.matrix_parameters)
            reason = "4 bytes per number of layers' matrices, 8 of others"
        case _:
            size_bytes, reason = 2 * FLOAT32 * trained, "8 bytes per trained"
    return Part(name="optimiser", size_bytes=size_bytes, reason=reason)
