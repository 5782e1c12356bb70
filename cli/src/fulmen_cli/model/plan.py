"""`fulmen model plan`: how much memory a training needs, and the GPUs on which it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from fulmen_cli.command import Output, OutputOption
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.memory import (
    EnginePlan,
    OptimizerKind,
    Part,
    TrainingPlan,
    engine_parts,
    total_bytes,
    training_parts,
)
from fulmen_cli.model.shape import ModelShape
from fulmen_cli.model.sources import model_shape
from fulmen_cli.output import console, print_json

__all__ = ["plan"]

GPU_COUNTS: Final = (1, 2, 4, 8)
USABLE: Final = 0.95
"""Share of a GPU's memory that is planned with: the allocator leaves gaps."""

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU and its memory as drivers report it, in bytes."""

    name: str
    memory_bytes: int


CARDS: Final = tuple(
    Card(name=name, memory_bytes=mib * _MIB)
    for name, mib in (
        ("RTX 3090 / 4090, 24 GB", 24_564),
        ("L4, 24 GB", 23_034),
        ("RTX 5090, 32 GB", 32_607),
        ("A100, 40 GB", 40_960),
        ("L40S, 48 GB", 46_068),
        ("A100 / H100, 80 GB", 81_559),
        ("H200, 141 GB", 143_771),
        ("B200, 180 GB", 183_359),
        ("MI300X, 192 GB", 196_592),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How the model is trained and served; names as in train.toml."""

    lora_rank: Annotated[int, typer.Option(min=0, max=1024, help="Rank of LoRA adapters; 0 trains all weights.")] = 0
    token_budget: Annotated[int, typer.Option(min=1, help="Positions of a micro-batch.")] = 8192
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations in the backward pass.")
    ] = False
    optimizer: Annotated[OptimizerKind, typer.Option(help="Optimiser; `muon` trains all weights, on one GPU.")] = (
        "adamw"
    )
    momentum: Annotated[float, typer.Option(help="Momentum of `sgd`, below 1; 0 for none.")] = 0.0
    reference: Annotated[bool, typer.Option("--reference", help="With a KL penalty: a second copy of the weights.")] = (
        False
    )
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs, with `fsdp2` if several.")] = 1
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Whether vLLM serves the policy on the same GPUs.")
    ] = True
    tensor_parallel: Annotated[int, typer.Option(min=1, max=1024, help="GPUs over which the engine is split.")] = 1
    max_sequences: Annotated[int, typer.Option(min=1, help="Concurrent calls.")] = 16
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of a call, prompt and answer together.")] = 4096

    @property
    def training(self) -> TrainingPlan:
        """What the trainer does."""
        return TrainingPlan(
            gpus=self.gpus,
            lora_rank=self.lora_rank,
            batch_tokens=self.token_budget,
            checkpointing=self.gradient_checkpointing,
            optimizer=self.optimizer,
            momentum=self.momentum,
            reference=self.reference,
        )

    @property
    def serving(self) -> EnginePlan:
        """What the engine does."""
        return EnginePlan(gpus=self.tensor_parallel, sequences=self.max_sequences, length=self.max_model_len)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a config.json, hf:organisation/name, or sizes as in config.json."
        ),
    ],
    options: PlanOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Computes the memory that a training needs, by part, and the GPUs on which it fits.

    Needs no stack and no GPU; only the configuration of a model on the hub is downloaded. The figures are for one GPU, in
    bf16 with weights and moments in float32, as the trainer computes (docs/models.md).

    Examples:

        fulmen model plan hf:Qwen/Qwen3-0.6B

        fulmen model plan ./Qwen3-4B --lora-rank 16 --gradient-checkpointing

        fulmen model plan hidden_size=2560,num_hidden_layers=36,num_attention_heads=32,vocab_size=151936 --gpus 4
    """
    if problems := _problems(options):
        raise CommandFailed("\n".join(problems), exit_code=Exit.USAGE)
    shape = model_shape(model)
    if shape.longest and options.max_model_len > shape.longest:
        text = f"--max-model-len {options.max_model_len} is more than the {shape.longest} tokens that {model} knows."
        raise CommandFailed(text, exit_code=Exit.USAGE)
    parts = _parts(shape, options)
    fits = {card.name: _fewest(shape, options, card) for card in CARDS}
    if output is Output.JSON:
        print_json(_as_json(model, shape, options, parts, fits))
    else:
        _print(shape, options, parts, fits)


def _problems(options: PlanOptions) -> list[str]:
    """Returns the problem of a training that is impossible; for Muon in the words of the trainer's settings."""
    problems, split = [], options.tensor_parallel
    if split > options.gpus:
        problems.append(f"--tensor-parallel {split} needs as many GPUs: --gpus {split}.")
    if not 0 <= options.momentum < 1:
        problems.append(f"--momentum {options.momentum:g} is not from 0 to below 1.")
    if options.momentum and options.optimizer != "sgd":
        problems.append("--momentum is SGD's: --optimizer sgd.")
    if options.optimizer == "muon" and options.gpus > 1:
        problems.append("--optimizer muon needs whole matrices: --gpus 1.")
    if options.optimizer == "muon" and options.lora_rank:
        problems.append("--optimizer muon needs all weights to be trained: --lora-rank 0.")
    return problems


def _parts(shape: ModelShape, options: PlanOptions) -> list[Part]:
    """Returns the memory of the GPU that holds most: a rank of the trainer, and a part of the engine."""
    return training_parts(shape, options.training) + (engine_parts(shape, options.serving) if options.engine else [])


def _fewest(shape: ModelShape, options: PlanOptions, card: Card) -> int:
    """Returns the fewest GPUs of a kind on which it fits, the engine split over all of them; 0 if on none of these counts."""
    more = () if options.optimizer == "muon" else GPU_COUNTS
    for gpus in (options.gpus, *(count for count in more if count > options.gpus)):
        split = max(options.tensor_parallel, gpus if gpus > options.gpus else 1)
        if total_bytes(_parts(shape, replace(options, gpus=gpus, tensor_parallel=split))) <= _usable(card):
            return gpus
    return 0


def _usable(card: Card) -> int:
    return int(card.memory_bytes * USABLE)


def _print(shape: ModelShape, options: PlanOptions, parts: list[Part], fits: dict[str, int]) -> None:
    screen, total = console(), total_bytes(parts)
    screen.print(f"{_count(shape.parameters)} parameters, {shape.layers} layers of width {shape.hidden}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("memory of one GPU" if options.gpus == 1 else f"memory of one of {options.gpus} GPUs")
    table.add_column("GiB", justify="right")
    table.add_column("", overflow="fold")
    for part in parts:
        table.add_row(part.name, _gib(part.size_bytes), part.reason)
    table.add_row("total", _gib(total), "")
    screen.print(table)
    screen.print()
    cards = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("GPU", "GiB", "fits"):
        cards.add_column(title, justify="right" if title == "GiB" else "left")
    for card in CARDS:
        cards.add_row(card.name, _gib(card.memory_bytes), _verdict(fits[card.name], options.gpus))
    screen.print(cards)
    if advice := _advice(options, fits):
        screen.print(f"\n{advice}", markup=False, soft_wrap=True)
    if chosen := _chosen(shape, options):
        rates = (
            f"learning_rate {chosen['learning_rate']:g}, of sft and rejection {chosen['learning_rate_supervised']:g}"
        )
        text = f"Defaults for this size: {rates}; max_tokens {chosen['max_tokens']}; versions in {chosen['weights_dtype']}."
        screen.print(f"\n{text}", markup=False, soft_wrap=True)


def _chosen(shape: ModelShape, options: PlanOptions) -> dict[str, Any]:
    """Returns what runs choose by such a model; nothing if the algorithm service is not installed here."""
    try:
        from fulmen_algorithm.training.defaults import REINFORCEMENT, SUPERVISED, ModelFacts
    except ImportError:
        return {}
    model, adapters = ModelFacts(parameters=shape.parameters, longest=shape.longest), options.lora_rank > 0
    return {
        "learning_rate": REINFORCEMENT.of(model.parameters, adapters=adapters),
        "learning_rate_supervised": SUPERVISED.of(model.parameters, adapters=adapters),
        "max_tokens": model.answer_tokens,
        "weights_dtype": model.published_as,
    }


def _verdict(gpus: int, asked: int) -> str:
    if gpus == asked:
        return "yes"
    return f"on {gpus} GPUs, with fsdp2" if gpus else "no"


def _advice(options: PlanOptions, fits: dict[str, int]) -> str:
    """Names what makes it smaller, where some of the GPUs are too small."""
    if all(gpus == options.gpus for gpus in fits.values()):
        return ""
    ways = [
        *(() if options.gradient_checkpointing else ("--gradient-checkpointing",)),
        *(() if options.lora_rank or options.optimizer == "muon" else ("--lora-rank 16",)),
        f"--token-budget {max(1, options.token_budget // 2)}",
    ]
    return f"Smaller: {', '.join(ways)}."


def _as_json(
    model: str, shape: ModelShape, options: PlanOptions, parts: list[Part], fits: dict[str, int]
) -> dict[str, Any]:
    return {
        "model": model,
        "parameters": shape.parameters,
        "gpus": options.gpus,
        "parts": [{"name": part.name, "size_bytes": part.size_bytes} for part in parts],
        "total_bytes": total_bytes(parts),
        "defaults": _chosen(shape, options),
        "cards": [{"name": card.name, "memory_bytes": card.memory_bytes, "gpus": fits[card.name]} for card in CARDS],
    }


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


def _count(parameters: int) -> str:
    scale, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / scale:.3g} {letter}"
