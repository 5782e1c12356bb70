"""What a stage will take and what it chooses by its model, before anything is created: size, memory, batch, defaults, doubts.

The model's configuration is read; its weights are not. Settings are those of the algorithm service that is installed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from threading import Thread
from typing import Any, Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.models.base_names import HUB_PREFIX
from fulmen.train_toml.train import TrainConfig
from fulmen_cli.exits import CommandFailed
from fulmen_cli.model.memory import Part, TrainingPlan, total_bytes, training_parts
from fulmen_cli.model.shape import ModelShape
from fulmen_cli.model.sources import model_config, shape_of

__all__ = ["Preflight", "preflights"]

HUB_LIMIT_S: Final = 10.0
WORTH_PLANNING: Final = 10_000_000
"""Parameters from which memory is worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is known of a stage beforehand.

    Attributes:
        parameters: Number of the model's parameters; 0 if unknown.
        unknown: Why the model is not known yet; empty if it is.
        batch: What a step samples and how it trains on it; empty if the stage samples nothing.
        memory: Memory of the GPU of the trainer that holds most, by part; empty if unknown.
        chosen: A sentence for each setting that is chosen by the model.
        doubts: A sentence for each setting that seldom works with such a model.
        problems: Why the stage cannot run with such a model, by setting.
    """

    parameters: int = 0
    unknown: str = ""
    batch: str = ""
    memory: Sequence[Part] = field(default=())
    chosen: Sequence[str] = field(default=())
    doubts: Sequence[str] = field(default=())
    problems: Sequence[str] = field(default=())

    @property
    def lines(self) -> list[str]:
        """Returns what is printed, a sentence a line."""
        found = [self.unknown] if self.unknown else []
        if self.batch:
            found.append(self.batch)
        if self.parameters >= WORTH_PLANNING and self.memory:
            parts = ", ".join(f"{part.name} {_gib(part.size_bytes)}" for part in self.memory)
            found.append(f"Trainer on a GPU: {_gib(total_bytes(list(self.memory)))} GiB ({parts}).")
        return [*found, *self.chosen, *(f"Warning: {doubt}" for doubt in self.doubts)]

    @property
    def document(self) -> dict[str, Any]:
        """Returns it for programs."""
        return {
            "parameters": self.parameters or None,
            "batch": self.batch,
            "memory": [{"name": part.name, "size_bytes": part.size_bytes} for part in self.memory],
            "chosen": list(self.chosen),
            "doubts": list(self.doubts),
        }


def preflights(config: TrainConfig, runs: Sequence[training_run_pb2.TrainingRun]) -> list[Preflight]:
    """Returns what is known of each stage; of one that trains no weights, nothing. Blocks.

    Args:
        config: The configuration.
        runs: The runs of its stages, whose settings are valid.

    Returns:
        One for each stage; none if the algorithm service is not installed.
    """
    try:
        from fulmen_algorithm.algorithms.registry import load_registry
        from fulmen_algorithm.runs.creation.rules import parse_settings
    except ImportError:
        return []
    registry = load_registry()
    (shape, described), unknown = _model_of(config)
    found = []
    for run in runs:
        entry = registry.get(run.algorithm)
        known = entry is not None and entry.trains
        if entry is None or not known:
            found.append(Preflight())
            continue
        settings = parse_settings(entry, run.settings_json)
        found.append(replace(_of_stage(settings, shape, unknown), problems=_split_problems(settings, described)))
    return found


_Model = tuple[ModelShape | None, Mapping[str, Any]]
"""The shape of a model and its configuration, which is empty if it is not known."""


def _model_of(config: TrainConfig) -> tuple[_Model, str]:
    """Returns the shape and the configuration of the policy's first weights, or why they are not known."""
    policy = config.policy
    if policy.build:
        return (
            (None, {}),
            f"The size of the model is known once {policy.build} has built it; what depends on it is said then.",
        )
    given = policy.path or (policy.base if policy.base.startswith(HUB_PREFIX) else "")
    if not given:
        return (None, {}), "The size of the model is known when the run begins; what depends on it is said then."
    found: Queue[tuple[_Model, str]] = Queue()
    # A daemon: the library of hubs goes on trying for half a minute, and nothing ends it.
    Thread(target=lambda: found.put(_read(given)), daemon=True).start()
    try:
        return found.get(timeout=HUB_LIMIT_S)
    except Empty:
        return (
            (None, {}),
            f"{given} was not read within {HUB_LIMIT_S:g} s; what depends on its size is said when the run begins.",
        )


def _read(given: str) -> tuple[_Model, str]:
    config: Mapping[str, Any] = {}
    try:
        config = model_config(given)
        return (shape_of(given, config), config), ""
    except CommandFailed as error:
        return (None, config), str(error)


def _split_problems(settings: Any, config: Mapping[str, Any]) -> list[str]:
    """Returns why the matrices of the model cannot be split as the stage asks."""
    from fulmen_algorithm.training.tensor_plan import split_problems

    return split_problems(config, settings.parallel.tensor) if config and settings.parallel.tensor > 1 else []


def _of_stage(settings: Any, shape: ModelShape | None, unknown: str) -> Preflight:
    from fulmen_algorithm.runs.creation.model_defaults import chosen, doubts
    from fulmen_algorithm.training.defaults import ModelFacts

    if shape is None:
        return Preflight(unknown=unknown)
    model = ModelFacts(parameters=shape.parameters, longest=shape.longest)
    parallel = settings.parallel
    plan = TrainingPlan(
        gpus=parallel.ranks_per_copy,
        lora_rank=settings.lora.rank if settings.lora is not None else 0,
        batch_tokens=settings.token_budget,
        checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer.kind,
        reference=settings.uses_reference and "reference" not in parallel.beside,
        critic=settings.critic_plan is not None and "critic" not in parallel.beside,
        tensor=parallel.tensor,
    )
    return Preflight(
        parameters=shape.parameters,
        batch=_batch(settings.for_model(model)),
        memory=training_parts(shape, plan),
        chosen=chosen(settings, model),
        doubts=list(doubts(settings, model)),
    )


def _batch(settings: Any) -> str:
    """Describes what a step samples; empty for stages that sample nothing."""
    if not settings.samples:
        return ""
    size = getattr(settings, "group_size", 1)
    rollouts, steps = settings.prompts_per_step * size, settings.optimizer_steps_per_step
    return (
        f"A step has {rollouts} rollouts ({settings.prompts_per_step} tasks, {size} of each), with answers of up to"
        f" {settings.answer_tokens} tokens, and takes {steps} optimiser step{'' if steps == 1 else 's'}."
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"
