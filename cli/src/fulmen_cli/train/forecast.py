"""How a stage will compute: packing, head, engine and time, as sentences. Unknown values are reported as unknown.

Source of each figure: the settings, the model's configuration, data that are at hand, or what an earlier run measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from fulmen.algorithm.v1.training_run_service_pb2 import MeasuredSteps
from fulmen_cli.model.memory import EnginePlan, Part, TrainingPlan, engine_parts, logits_bytes
from fulmen_cli.model.shape import ModelShape

__all__ = ["engine_memory", "head", "packing", "time"]

_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0


def packing(settings: Any, share: float | None, source: str) -> str:
    """Describes micro-batches.

    Args:
        settings: Settings of an algorithm that trains weights.
        share: Tokens as a share of the computed positions; None if unknown.
        source: What the share is known from.
    """
    text = f"Packing: rows share lines in micro-batches of up to {settings.token_budget} positions"
    if share is None:
        return f"{text}; the share of padding is known after the first step (packing_efficiency)."
    padding = 1 - share
    told = "without padding" if padding < 0.0005 else f"{padding:.1%} of them padding"
    return f"{text}, {told} ({source}). A model that cannot separate the rows of a line pads every row instead."


def head(shape: ModelShape, plan: TrainingPlan, changes: str) -> str:
    """Describes how log-probabilities are computed.

    Args:
        shape: The model.
        plan: How it is trained.
        changes: Setting of the model's configuration that changes logits after the head; empty for none.
    """
    from fulmen_algorithm.training.heads import LOGITS_AT_ONCE

    held = f"{logits_bytes(shape, plan) / 2**30:.1f} GiB"
    if changes:
        return (
            f"Head: {changes} changes the logits of this model, so the logits of a whole micro-batch are kept: {held}. A smaller"
            " token_budget needs less."
        )
    positions = max(1, LOGITS_AT_ONCE // shape.vocabulary)
    if positions >= plan.own_tokens:
        return (
            f"Head: cross entropy of a micro-batch in one piece of up to {plan.own_tokens} positions: {held} of logits."
        )
    whole = logits_bytes(shape, replace(plan, plain_head=False))
    return (
        f"Head: cross entropy in pieces of {positions} positions, whose logits are computed again in the backward pass:"
        f" {held} instead of {whole / 2**30:.1f} GiB."
    )


def engine_memory(engine: Any, shape: ModelShape) -> tuple[Sequence[Part], str]:
    """Returns the memory of one engine on one GPU by its settings, and a sentence about it; nothing of an external one."""
    if engine.kind == "external":
        return (), ""
    if engine.kind == "embedded":
        token = engine_parts(shape, EnginePlan(sequences=1, length=1))[1].size_bytes
        parts = engine_parts(shape, EnginePlan(sequences=0))
        text = f"The cache grows with the calls: {token / 2**10:.3g} KiB for each token of prompt and answer."
        return [part for part in parts if part.size_bytes], text
    length = engine.max_model_len or shape.longest
    plan = EnginePlan(
        gpus=engine.tensor_parallel,
        nodes=engine.nodes,
        sequences=engine.max_sequences,
        length=length,
        number_bytes=4 if engine.dtype == "float32" else 2,
    )
    cache = f"Its cache holds {engine.max_sequences} calls of {length} tokens (max_sequences, max_model_len). "
    return engine_parts(shape, plan), (
        f"{cache if length else ''}vLLM takes {engine.gpu_memory_utilization:.0%} of each GPU (gpu_memory_utilization), and"
        f" calls whose cache does not fit wait; without a GPU its cache is {engine.cpu_cache_gib} GiB."
    )


def time(settings: Any, measured: MeasuredSteps | None, unasked: str) -> str:
    """Returns how long the stage is expected to take, by an earlier run of the same model and settings alone.

    Args:
        settings: Its settings.
        measured: The service's answer; None if it was not called.
        unasked: Why it was not.
    """
    if measured is None:
        return f"Expected time: not known: {unasked}"
    if not measured.training_run:
        return "Expected time: not known: no run of this model with these settings was measured here."
    run = measured.training_run.rpartition("/")[2]
    each = f"{_seconds(measured.step_seconds)} a step, as run {run} took on average over {measured.steps} steps"
    if not settings.steps:
        return f"Expected time: {each}; epochs and the data decide the number of steps."
    return f"Expected time: {_seconds(settings.steps * measured.step_seconds)} for {settings.steps} steps: {each}."


def _seconds(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.2g} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.1f} min"
    return f"{seconds / _HOUR_S:.1f} h"
