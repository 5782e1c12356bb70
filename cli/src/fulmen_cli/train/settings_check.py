"""Checks the stages of a train.toml by the rules of the algorithm service that is installed here, without a stack."""

from __future__ import annotations

from typing import Final

from fulmen.train_toml.train import TrainConfig
from fulmen.training.plan import training_run

__all__ = ["stage_problems"]

PROJECT: Final = "projects/default"
# What a training will have published, or names, when its stages begin.
ANY_VERSION: Final = "resources/any/versions/1"
ANY_RUN: Final = f"{PROJECT}/trainingRuns/any"


def stage_problems(config: TrainConfig) -> list[str] | None:
    """Returns the problems of all stages: unknown algorithms, settings that are not valid, inputs that are missing.

    What a deployment allows, such as addresses of engines, and what it has, such as versions, is left to its services.

    Returns:
        The problems; None if the algorithm service is not installed.
    """
    try:
        from fulmen_algorithm.algorithms.registry import load_registry
        from fulmen_algorithm.runs.creation.rules import checked_draft
        from fulmen_algorithm.transport.encode import draft
    except ImportError:
        return None
    registry = load_registry()
    inputs = dict.fromkeys(("agent", "bundle", *config.data.uses), ANY_VERSION)
    if config.data.rollouts:
        inputs["rollouts"] = ANY_RUN
    problems: list[str] = []
    continues = False
    for number, stage in enumerate(config.stages, start=1):
        entry = registry.get(stage.algorithm)
        trains = entry is None or entry.trains
        run = training_run(
            config,
            stage,
            name="",
            inputs=inputs,
            read={stage.algorithm: entry.inputs if entry else ()},
            continues=continues,
            trains=trains,
        )
        continues = continues or trains
        _, violations = checked_draft(draft(run, request_id=""), registry)
        problems += [f"stage {number} ({stage.algorithm}): {each.field}: {each.description}" for each in violations]
    return problems
