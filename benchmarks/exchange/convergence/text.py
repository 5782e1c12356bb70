"""A small transformer learns to write Python, byte by byte, on ranks that are threads.

The text is that of the standard library's modules; every tenth file is held out. Every rank draws places of its own,
from the seed and its number, and does what a rank of a training run does: passes, exchange, clipping, step.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.exchange.convergence.cases import Cell, Learned, switches
from benchmarks.exchange.convergence.local_ranks import LocalLink, Meeting, on_ranks
from fulmen_algorithm.training.gradient_norms import clip_gradients
from fulmen_algorithm.training.optimizer import LearningRate
from fulmen_algorithm.training.settings import OptimizerSettings, Schedule
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import ExchangeSettings
from fulmen_exchange.settings import CodecSettings

RANKS = 4
LINES, POSITIONS = 8, 64
"""Of a rank's batch."""
BYTES = 256
WARMUP_STEPS = 25
HELD_OUT_LINES = 256
HELD_OUT_EVERY = 10


@lru_cache(maxsize=1)
def texts() -> tuple[Tensor, Tensor]:
    """Reads what is learned and what is held out: uint8 [n] each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, file in enumerate(files):
        parts[number % HELD_OUT_EVERY == 0].append(file.read_bytes())
    learned, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return learned, held_out


def corpus() -> dict[str, object]:
    """Says which text it was."""
    learned, held_out = texts()
    digest = hashlib.sha256(learned.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest()
    return {"learned_bytes": len(learned), "held_out_bytes": len(held_out), "sha256": digest}


def model_of(seed: int) -> LlamaForCausalLM:
    """Builds the untrained model: 0.56 M parameters."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # Not the seed of all threads.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def optimizer_of(cell: Cell, model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, LearningRate]:
    """Builds what a run's settings would build."""
    settings = OptimizerSettings(
        learning_rate=cell.rate,
        schedule=Schedule.COSINE,
        warmup_steps=min(WARMUP_STEPS, cell.size.steps // 2),
        total_steps=cell.size.steps,
    )
    rule = cell.case.optimizer
    if rule["kind"] == "sgd":
        made: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=cell.rate, momentum=rule.get("momentum", 0.0)
        )
    else:
        made = torch.optim.AdamW(model.parameters(), lr=cell.rate, betas=(0.9, 0.95), weight_decay=0.0)
    return made, LearningRate(settings=settings)


def batches(text: Tensor, *, seed: int, lines: int) -> Tensor:
    """Draws lines of a text: int64 [lines, positions + 1]."""
    chance = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(text) - POSITIONS, (lines, 1), generator=chance)
    return text[begins + torch.arange(POSITIONS + 1)].long()


def loss_of(model: LlamaForCausalLM, lines: Tensor) -> Tensor:
    """Returns the mean loss of the bytes of some lines after the first, nats; int64 [lines, positions + 1]."""
    logits = model(lines[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM) -> float:
    """Returns the loss on the same held-out lines, whatever the seed: nats per byte."""
    lines = batches(texts()[1], seed=0, lines=HELD_OUT_LINES)
    parts = lines.split(LINES * RANKS)
    return sum(float(loss_of(model, part)) * len(part) for part in parts) / len(lines)


def train(cell: Cell) -> Learned:
    """Trains a cell.

    Raises:
        AssertionError: if ranks end with different weights.
    """
    began = perf_counter()
    texts()  # before threads ask for it
    found = on_ranks(RANKS, lambda meeting, rank: _train_rank(cell, meeting, rank))
    weights = {hashlib.sha256(one.weights).hexdigest() for one in found}
    assert len(weights) == 1, f"{cell.case.name}: the ranks hold different weights"
    first, sent = found[0], [fmean(steps) for steps in zip(*(one.sent_bytes for one in found), strict=True)]
    return Learned(
        final=first.curve[-1][1],
        curve=first.curve,
        sent_bytes=fmean(sent),
        late_sent_bytes=fmean(sent[len(sent) // 2 :]),
        events=switches(first.events),
        seconds=round(perf_counter() - began, 1),
        weights=first.weights,
    )


def distance(cell: Cell, weights: bytes, dense: bytes) -> float:
    """Returns how far weights ended from those of dense training, by how far that went: ||W_c - W|| / ||W - W_0||.

    Args:
        cell: Whose first weights both began with.
        weights: W_c, float32.
        dense: W, float32.
    """
    first = flat(model_of(cell.seed)).double()
    ended, dense_ended = (torch.frombuffer(bytearray(each), dtype=torch.float32).double() for each in (weights, dense))
    return float((ended - dense_ended).norm() / (dense_ended - first).norm())


def flat(model: LlamaForCausalLM) -> Tensor:
    """Returns all weights, one after another: float32 [n]."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a rank ends with.

    Attributes:
        weights: All of them, one after another, float32.
        curve: Steps, and the loss on held-out text then; of rank 0 alone.
        sent_bytes: In each step.
        events: Of its exchanges.
    """

    weights: bytes
    curve: list[tuple[int, float]]
    sent_bytes: list[int]
    events: list[str]


def _train_rank(cell: Cell, meeting: Meeting, rank: int) -> _Rank:
    """Does what one rank does."""
    model = model_of(cell.seed)
    optimizer, schedule = optimizer_of(cell, model)
    settings: CodecSettings = TypeAdapter(ExchangeSettings).validate_python(cell.exchange)
    link, ranks = LocalLink(meeting, rank), Ranks(rank=rank, world_size=meeting.size)
    parameters = dict(model.named_parameters())
    reducer = CodecReducer.open(
        settings, parameters=parameters, link=link, seed=cell.seed, optimizer=cell.case.optimizer["kind"]
    )
    size, curve, sent, events = cell.size, list[tuple[int, float]](), [0], list[str]()
    for step in range(size.steps):
        lines = batches(texts()[0], seed=(cell.seed * 1000 + step) * meeting.size + rank, lines=LINES)
        # Losses are normalised over all ranks, and summed, as those of a run are.
        (loss_of(model, lines) / meeting.size).backward()
        reducer.reduce(list(parameters.values()), ranks, StepInfo(progress=step / size.steps))
        if reducer.clips_sums:
            clip_gradients(list(parameters.values()), cell.case.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(taken=step, planned=step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reducer.on_step()
        if step + 1 == size.steps:
            reducer.synchronize()
        sent.append(link.sent_bytes)
        events += reducer.drain().events
        if rank == 0 and (step + 1) % size.every == 0:
            curve.append((step + 1, held_out_loss(model)))
    moved = [after - before for before, after in pairwise(sent)]
    return _Rank(weights=flat(model).numpy().tobytes(), curve=curve, sent_bytes=moved, events=events)
