"""A forecast names the run that it comes from, and where nothing was measured it has no figure."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fulmen.algorithm.v1.training_run_service_pb2 import MeasuredSteps
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, ExternalEngine, VllmEngine
from fulmen_cli.model.memory import TrainingPlan
from fulmen_cli.model.shape import ModelShape
from fulmen_cli.train import forecast

SHAPE = ModelShape(hidden=64, layers=2, heads=4, key_heads=2, head=16, inner=128, vocabulary=1000, longest=256)
MEASURED = MeasuredSteps(training_run="projects/default/trainingRuns/early", steps=40, step_seconds=90.0)


def test_the_time_is_that_of_the_measured_steps_times_their_number() -> None:
    told = forecast.time(SimpleNamespace(steps=100), MEASURED, "")
    assert told == "Expected time: 2.5 h for 100 steps: 1.5 min a step, as run early took on average over 40 steps."


def test_where_data_decide_the_steps_the_time_of_one_is_told() -> None:
    assert "1.5 min a step" in (told := forecast.time(SimpleNamespace(steps=0), MEASURED, ""))
    assert told.endswith("epochs and the data decide the number of steps.")


@pytest.mark.parametrize(
    ("measured", "why"), [(MeasuredSteps(), "no run of this model with these settings was measured"), (None, "gone")]
)
def test_a_time_that_was_not_measured_is_not_invented(measured: MeasuredSteps | None, why: str) -> None:
    told = forecast.time(SimpleNamespace(steps=100), measured, "gone.")
    assert why in told
    assert not any(character.isdigit() for character in told)


@pytest.mark.parametrize(("share", "told"), [(1.0, "without padding"), (0.75, "25.0% of them padding")])
def test_the_padding_is_what_is_no_token(share: float, told: str) -> None:
    assert told in forecast.packing(SimpleNamespace(token_budget=512), share, "measured by run early")


def test_a_small_vocabulary_needs_one_piece() -> None:
    assert "in one piece of up to 512 positions" in forecast.head(SHAPE, TrainingPlan(batch_tokens=512), "")


def test_engines_are_told_as_far_as_their_memory_is_decided_by_settings() -> None:
    assert forecast.engine_memory(ExternalEngine(kind="external", base_url="http://a/v1"), SHAPE) == ((), "")
    # 2 * 2 layers * 2 heads * 16 * 2 bytes.
    _, text = forecast.engine_memory(EmbeddedEngine(), SHAPE)
    assert "0.25 KiB for each token" in text
    whole, _ = forecast.engine_memory(VllmEngine.model_validate_json('{"kind": "vllm", "dtype": "float32"}'), SHAPE)
    half = forecast.engine_memory(VllmEngine.model_validate_json(json.dumps({"kind": "vllm"})), SHAPE)[0]
    assert [a.size_bytes // b.size_bytes for a, b in zip(whole[:2], half[:2], strict=True)] == [2, 2]
