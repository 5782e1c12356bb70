"""What a run may say about its ranks."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.training.compute import Ddp, Fsdp2, OneProcess, Precision


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, OneProcess()),
        ({"parallel": {"kind": "ddp", "ranks": 4}}, Ddp(ranks=4)),
        (
            {"parallel": {"kind": "fsdp2", "ranks": 2, "reshard_after_forward": False}},
            Fsdp2(ranks=2, reshard_after_forward=False),
        ),
    ],
)
def test_a_run_names_what_trains_it(given: dict[str, object], expected: object) -> None:
    settings = SftSettings.model_validate_json(json.dumps({**given, "precision": "bf16"}))
    assert settings.compute.parallel == expected
    assert settings.compute.precision is Precision.BF16


@pytest.mark.parametrize(
    "given",
    [
        {"parallel": {"kind": "ddp", "reshard_after_forward": True}},
        {"parallel": {"kind": "ddp", "ranks": 0}},
        {"parallel": {"kind": "fsdp2", "ranks": 2}, "lora": {"roles": ["solver", "critic"]}},
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SftSettings.model_validate_json(json.dumps(given))
