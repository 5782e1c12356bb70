"""Exchange metrics of the optimiser steps become one set of metrics of the training step."""

import pytest

from fulmen_algorithm.algorithms.policy_gradient import means
from fulmen_algorithm.training.settings import StepResult


def step(**metrics: float) -> StepResult:
    exchange = {f"exchange_{name}": value for name, value in metrics.items()}
    return StepResult(
        loss=1.0, grad_norm=1.0, skipped=False, learning_rate=0.1, seconds=1.0, metrics={}, exchange=exchange
    )


def test_costs_are_summed_and_samples_are_averaged_over_the_steps_that_have_them():
    found = means(
        [
            step(
                rounds=1,
                raw_bytes=800,
                sent_bytes=100,
                received_bytes=300,
                ratio=8,
                encode_seconds=0.5,
                gradient_cosine=0.9,
            ),
            step(rounds=1, raw_bytes=800, sent_bytes=300, received_bytes=300, ratio=8 / 3, encode_seconds=0.25),
            step(
                rounds=1,
                raw_bytes=800,
                sent_bytes=400,
                received_bytes=200,
                ratio=2,
                encode_seconds=0.25,
                gradient_cosine=0.7,
            ),
        ]
    )
    assert {name: value for name, value in found.items() if name.startswith("exchange_")} == pytest.approx(
        {
            "exchange_rounds": 3,
            "exchange_raw_bytes": 2400,
            "exchange_sent_bytes": 800,
            "exchange_received_bytes": 800,
            "exchange_ratio": 3,
            "exchange_encode_seconds": 1.0,
            "exchange_gradient_cosine": 0.8,
        }
    )


def test_without_an_exchange_there_are_no_exchange_metrics():
    assert not [name for name in means([step(), step()]) if name.startswith("exchange")]
