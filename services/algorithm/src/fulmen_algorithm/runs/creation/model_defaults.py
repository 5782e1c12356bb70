"""What a run chooses by its model, and what of its settings does not fit the model. Importable without torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fulmen_algorithm.runs.algorithm import AlgorithmSettings
from fulmen_algorithm.training.compute import Precision
from fulmen_algorithm.training.defaults import ModelFacts
from fulmen_algorithm.training.settings import AdamW, FullWeights

LONGEST = ("max_position_embeddings", "n_positions")
"""Names of the maximum number of tokens of a sequence in a model's configuration."""
FASTEST, SLOWEST = 10.0, 1 / 100
"""Learning rates beyond these multiples of the default are doubted."""


def model_facts(model_dir: Path, parameters: int) -> ModelFacts:
    """Reads what defaults depend on from a model folder; blocks.

    Args:
        model_dir: The folder.
        parameters: Number of the model's parameters; 0 if unknown.
    """
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # The trainer reports the reason when it loads the model.
        return ModelFacts(parameters=parameters)
    return ModelFacts(parameters=parameters, longest=_longest(config))


def _longest(config: Any) -> int:
    if not isinstance(config, Mapping):
        return 0
    inner = config.get("text_config")
    of_text = inner if isinstance(inner, Mapping) else config
    found = (of_text.get(name) for name in LONGEST)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def chosen(given: AlgorithmSettings, model: ModelFacts) -> list[str]:
    """Returns a sentence for each setting that is chosen by the model."""
    fitted, found = given.for_model(model), []
    if given.learning_rate is None:
        found.append(f"learning_rate is {fitted.learning_rate:g}: the default for {model}.")
    found += given.choices(model)
    if isinstance(given.weights, FullWeights) and given.weights.dtype is None and model.published_as == "bfloat16":
        found.append(f"Versions are published in bfloat16: the default for {model} (weights.dtype).")
    return found


def doubts(given: AlgorithmSettings, model: ModelFacts, *, device: str = "cpu") -> Iterator[str]:
    """Yields a sentence for each setting outside of what usually works with a model of this size."""
    usual = given.default_rate.of(model.parameters, adapters=given.lora is not None)
    if isinstance(given.optimizer, AdamW) and given.learning_rate is not None and model.parameters:
        ratio = given.learning_rate / usual
        if ratio > FASTEST:
            yield (
                f"learning_rate is {given.learning_rate:g}, {ratio:.0f} times the default for {model} ({usual:g}): "
                "such steps may destroy the model's abilities."
            )
        elif ratio < SLOWEST:
            yield (
                f"learning_rate is {given.learning_rate:g}, {1 / ratio:.0f} times less than the default for {model}"
                f" ({usual:g}): the run may learn hardly anything."
            )
    if model.is_large and given.engine.kind == "embedded" and given.samples:
        yield f'The embedded engine is for small models, and slow for {model}: use engine = {{ kind = "vllm" }}.'
    if model.is_large and device != "cpu" and given.precision is Precision.FP32:
        yield f'precision is "fp32": for {model}, "bf16" is several times as fast on a GPU.'
    yield from given.doubts(model)
