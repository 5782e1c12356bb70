"""What a stage will take and what it chooses by its model, before anything is created.

Batch, packing, head, memory of trainer and engine, time, defaults, doubts. The model's configuration is read; its weights are
not. The settings come from the locally installed algorithm service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.algorithm.v1.training_run_service_pb2 import MeasuredSteps
from fulmen.models.base_names import HUB_PREFIX
from fulmen.train_toml.train import TrainConfig
from fulmen_cli.exits import CommandFailed
from fulmen_cli.model.memory import Part, TrainingPlan, total_bytes, training_parts
from fulmen_cli.model.shape import ModelShape
from fulmen_cli.model.sources import model_config, shape_of
from fulmen_cli.train import forecast

__all__ = ["Known", "Preflight", "preflights"]

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
        packing: How rows become micro-batches; empty if no weights are trained.
        head: How log-probabilities are computed; empty if the model is not known.
        memory: Memory of the GPU of the trainer that holds most, by part; empty if unknown.
        engine: Memory of a GPU of an engine, by part; empty if unknown, or not Fulmen's.
        engine_text: A sentence about it.
        time: How long it is expected to take, and by which run.
        chosen: A sentence for each setting that is chosen by the model.
        doubts: A sentence for each setting that seldom works with such a model.
        problems: Why the stage cannot run with such a model, by setting.
    """

    parameters: int = 0
    unknown: str = ""
    batch: str = ""
    packing: str = ""
    head: str = ""
    memory: Sequence[Part] = field(default=())
    engine: Sequence[Part] = field(default=())
    engine_text: str = ""
    time: str = ""
    chosen: Sequence[str] = field(default=())
    doubts: Sequence[str] = field(default=())
    problems: Sequence[str] = field(default=())

    @property
    def lines(self) -> list[str]:
        """Returns what is printed, a sentence a line."""
        found = [self.unknown, self.batch, self.packing, self.head]
        if self.parameters >= WORTH_PLANNING:
            found += [_memory("Trainer", self.memory), " ".join((_memory("Engine", self.engine), self.engine_text))]
        doubts = [f"Warning: {doubt}" for doubt in self.doubts]
        return [text for text in (*found, self.time, *self.chosen, *doubts) if text.strip()]

    @property
    def document(self) -> dict[str, Any]:
        """Returns it for programs."""
        return {
            "parameters": self.parameters or None,
            "batch": self.batch,
            "packing": self.packing,
            "head": self.head,
            "memory": _sizes(self.memory),
            "engine": _sizes(self.engine),
            "time": self.time,
            "chosen": list(self.chosen),
            "doubts": list(self.doubts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Information about the stages besides their file.

    Attributes:
        measured: What earlier runs measured, by stage; empty if no service was asked.
        unasked: Why not.
        demonstrations: Data of supervised stages.
    """

    measured: Sequence[MeasuredSteps] = ()
    unasked: str = ""
    demonstrations: Sequence[Mapping[str, Any]] = ()


def preflights(config: TrainConfig, runs: Sequence[training_run_pb2.TrainingRun], known: Known) -> list[Preflight]:
    """Returns what is known of each stage; of one that trains no weights, its time alone. Blocks.

    Args:
        config: The configuration.
        runs: The runs of its stages, whose settings are valid.
        known: Further information.

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
    for run, measured in zip_longest(runs, known.measured[: len(runs)]):
        entry = registry.get(run.algorithm)
        if entry is None:
            found.append(Preflight())
            continue
        settings = parse_settings(entry, run.settings_json)
        duration = forecast.time(settings, measured, known.unasked)
        if not entry.trains:
            found.append(Preflight(time=duration))
            continue
        each = _of_stage(settings, shape, unknown, described)
        told = forecast.packing(settings, *_packed(config, run, settings, measured, known.demonstrations))
        problems = _split_problems(settings, described)
        found.append(replace(each, packing=told, time=duration, problems=problems))
    return found


def _packed(
    config: TrainConfig,
    run: training_run_pb2.TrainingRun,
    settings: Any,
    measured: MeasuredSteps | None,
    demonstrations: Sequence[Mapping[str, Any]],
) -> tuple[float | None, str]:
    """Returns the share of positions that are tokens, and how it is known: by an earlier run, or by the data themselves."""
    if measured is not None and measured.HasField("packing_efficiency"):
        return measured.packing_efficiency, f"measured by run {measured.training_run.rpartition('/')[2]}"
    alone = run.algorithm == "sft" and not run.inputs.get("rollouts") and settings.parallel.kind == "none"
    folder = Path(config.policy.path) if config.policy.path else None
    if alone and demonstrations and folder is not None and (folder / "tokenizer.json").is_file():
        from fulmen_algorithm.training.padding import packing_share

        return packing_share(settings, folder, demonstrations), "computed from the first batches"
    return None, ""


_Model = tuple[ModelShape | None, Mapping[str, Any]]
"""The shape of a model and its configuration, which is empty if it is not known."""


def _model_of(config: TrainConfig) -> tuple[_Model, str]:
    """Returns the shape and the configuration of the policy's first weights, or why they are not known."""
    policy = config.policy
    if policy.build:
        return (
            (None, {}),
            f"The size of the model is known once {policy.build} has built it; its memory and defaults are reported then.",
        )
    given = policy.path or (policy.base if policy.base.startswith(HUB_PREFIX) else "")
    if not given:
        later = "The size of the model is known when the run begins; its memory and defaults are reported then."
        return (None, {}), later
    found: Queue[tuple[_Model, str]] = Queue()
    # A daemon: the library of hubs keeps trying for half a minute, and cannot be interrupted.
    Thread(target=lambda: found.put(_read(given)), daemon=True).start()
    try:
        return found.get(timeout=HUB_LIMIT_S)
    except Empty:
        return (
            (None, {}),
            f"{given} was not read within {HUB_LIMIT_S:g} s; memory and defaults are reported when the run begins.",
        )


def _read(given: str) -> tuple[_Model, str]:
    config: Mapping[str, Any] = {}
    try:
        config = model_config(given)
        return (shape_of(given, config), config), ""
    except CommandFailed as error:
        return (None, config), str(error)


def _split_problems(settings: Any, config: Mapping[str, Any]) -> list[str]:
    """Returns why the matrices of the model, or its rows, cannot be split as the stage asks."""
    from fulmen_algorithm.training.context_plan import context_problems
    from fulmen_algorithm.training.tensor_plan import split_problems

    parallel = settings.parallel
    found = split_problems(config, parallel.tensor) if config and parallel.tensor > 1 else []
    return [*found, *(context_problems(config) if parallel.context > 1 else [])]


def _of_stage(settings: Any, shape: ModelShape | None, unknown: str, config: Mapping[str, Any]) -> Preflight:
    from fulmen_algorithm.runs.creation.model_defaults import chosen, doubts
    from fulmen_algorithm.training.defaults import ModelFacts
    from fulmen_algorithm.training.heads import setting_after_head

    if shape is None:
        return Preflight(unknown=unknown)
    model = ModelFacts(parameters=shape.parameters, longest=shape.longest)
    parallel = settings.parallel
    of_text = config.get("text_config")
    changes = setting_after_head(of_text if isinstance(of_text, Mapping) else config)
    plan = TrainingPlan(
        gpus=parallel.ranks_per_copy,
        lora_rank=settings.lora.rank if settings.lora is not None else 0,
        batch_tokens=settings.token_budget,
        checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer.kind,
        momentum=getattr(settings.optimizer, "momentum", 0.0),
        reference=settings.uses_reference and "reference" not in parallel.beside,
        critic=settings.critic_plan is not None and "critic" not in parallel.beside,
        tensor=parallel.tensor,
        context=parallel.context,
        plain_head=not changes,
    )
    engine, engine_text = forecast.engine_memory(settings.engine, shape)
    return Preflight(
        parameters=shape.parameters,
        batch=_batch(settings.for_model(model)),
        head=forecast.head(shape, plan, changes),
        memory=training_parts(shape, plan),
        engine=engine,
        engine_text=engine_text,
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


def _memory(what: str, parts: Sequence[Part]) -> str:
    """Describes the memory of a GPU by part; empty without parts."""
    if not parts:
        return ""
    listed = ", ".join(f"{part.name} {_gib(part.size_bytes)}" for part in parts)
    return f"{what} on a GPU: {_gib(total_bytes(list(parts)))} GiB ({listed})."


def _sizes(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"name": part.name, "size_bytes": part.size_bytes} for part in parts]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"
