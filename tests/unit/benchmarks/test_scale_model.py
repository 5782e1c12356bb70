"""The simulation of a deployment agrees with what queueing theory says of it, where that says something."""

from __future__ import annotations

from dataclasses import replace
from math import factorial

import pytest

from benchmarks.scale.model import Costs, Deployment, predicted

NOTHING = Costs(store_s=0.0, postgres_s=0.0, proxy_s=0.0, runner_s=0.0, session_s=0.0)
SECONDS = 4000.0


def repairman(customers: int, *, think_s: float, service_s: float) -> float:
    """Returns the throughput of the machine repairman model, M/M/1//N (Kleinrock, Queueing Systems I, 3.8)."""
    load = service_s / think_s
    terms = [factorial(customers) / factorial(customers - busy) * load**busy for busy in range(customers + 1)]
    return (1 - terms[0] / sum(terms)) / service_s


@pytest.mark.parametrize("runners", [1, 4, 12])
def test_a_single_engine_with_agents_that_think_is_the_machine_repairman(runners: int) -> None:
    deployment = Deployment(runners=runners, slots=1, think_s=2.0, calls=1, generation_s=0.4, places=1)
    found = predicted(deployment, NOTHING, seconds=SECONDS)
    expected = repairman(runners, think_s=2.0, service_s=0.4)
    assert found.rollouts_per_s == pytest.approx(expected, rel=0.05)
    assert found.busy["engines"] == pytest.approx(expected * 0.4, rel=0.05)


def test_what_is_not_busy_is_bound_by_its_agents_and_obeys_the_response_time_law() -> None:
    deployment = Deployment(runners=50, slots=2, think_s=10.0, calls=1, generation_s=5.0)
    found = predicted(deployment, NOTHING, seconds=SECONDS)
    assert found.rollouts_per_s == pytest.approx(100 / 15.0, rel=0.03)
    assert found.bound_by == "agents"


def test_a_service_that_is_too_small_is_named_and_carries_no_more_than_it_can() -> None:
    costs = replace(NOTHING, store_s=0.05)
    found = predicted(Deployment(runners=100, slots=1, think_s=1.0, calls=0, generation_s=0.0), costs)
    assert found.rollouts_per_s == pytest.approx(2 / 0.05, rel=0.03)
    assert found.bound_by == "store"


def test_training_takes_what_ends_and_holds_up_what_is_too_far_ahead() -> None:
    slow = Deployment(
        runners=64, slots=1, think_s=1.0, calls=0, generation_s=0.0, batch=64, step_s=10.0, ahead_steps=0.0
    )
    found = predicted(slow, NOTHING, seconds=SECONDS)
    # Nothing overlaps: a step's rollouts begin when the step before has ended.
    assert found.rollouts_per_s < 64 / 10.0
    assert found.busy["trainer"] > 0.6
    ahead = predicted(replace(slow, ahead_steps=2.0), NOTHING, seconds=SECONDS)
    assert ahead.rollouts_per_s == pytest.approx(64 / 10.0, rel=0.05)
    assert ahead.bound_by == "trainer"
