"""The simulation of a deployment agrees with what queueing theory says of it, where that says something."""

from __future__ import annotations

from dataclasses import replace
from math import factorial

import pytest

from benchmarks.scale.engines import EngineSpeed
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
    deployment = Deployment(runners=runners, slots=1, think_s=2.0, calls=1, engines=1, engine=EngineSpeed(beside_s=0.4))
    found = predicted(deployment, NOTHING, seconds=SECONDS)
    expected = repairman(runners, think_s=2.0, service_s=0.4)
    assert found.rollouts_per_s == pytest.approx(expected, rel=0.05)
    assert found.busy["engines"] == pytest.approx(expected * 0.4, rel=0.05)


def test_what_is_not_busy_is_bound_by_its_agents_and_obeys_the_response_time_law() -> None:
    deployment = Deployment(runners=50, slots=2, think_s=10.0, calls=1, engines=1, engine=EngineSpeed(alone_s=5.0))
    found = predicted(deployment, NOTHING, seconds=SECONDS)
    assert found.rollouts_per_s == pytest.approx(100 / 15.0, rel=0.03)
    assert found.bound_by == "agents"


def test_a_service_that_is_too_small_is_named_and_carries_no_more_than_it_can() -> None:
    costs = replace(NOTHING, store_s=0.05)
    found = predicted(Deployment(runners=100, slots=1, think_s=1.0, calls=0), costs)
    assert found.rollouts_per_s == pytest.approx(2 / 0.05, rel=0.03)
    assert found.bound_by == "store"


def test_training_takes_what_ends_and_holds_up_what_is_too_far_ahead() -> None:
    slow = Deployment(runners=64, slots=1, think_s=1.0, calls=0, batch=64, step_s=10.0, ahead_steps=0.0)
    found = predicted(slow, NOTHING, seconds=SECONDS)
    # Nothing overlaps: a step's rollouts begin when the step before has ended.
    assert found.rollouts_per_s < 64 / 10.0
    assert found.busy["trainer"] > 0.6
    ahead = predicted(replace(slow, ahead_steps=2.0), NOTHING, seconds=SECONDS)
    assert ahead.rollouts_per_s == pytest.approx(64 / 10.0, rel=0.05)
    assert ahead.bound_by == "trainer"


def test_attempts_beyond_the_seats_of_the_engines_wait_and_add_nothing() -> None:
    engine = EngineSpeed(alone_s=1.0, beside_s=0.1, seats=4)
    fits = Deployment(runners=8, slots=1, think_s=0.0, calls=5, engines=2, engine=engine)
    found, twice = (predicted(each, NOTHING, seconds=SECONDS) for each in (fits, replace(fits, runners=16)))
    # Four calls are in each engine all the time, of 1.4 s each.
    assert found.rollouts_per_s == pytest.approx(8 / (5 * 1.4), rel=0.03)
    assert twice.rollouts_per_s == pytest.approx(found.rollouts_per_s, rel=0.03)
    assert twice.bound_by == "seats"


def test_new_weights_cost_the_time_of_the_swap_and_of_every_conversation_that_is_computed_again() -> None:
    engine = EngineSpeed(beside_s=0.1, swap_s=2.0, recompute_s=0.5)
    given = Deployment(
        runners=10, slots=1, think_s=0.0, calls=100, engines=1, engine=engine, batch=2, step_s=10.0, ahead_steps=10.0
    )
    found = predicted(given, NOTHING, seconds=SECONDS)
    # In each step of ten seconds or longer the engine stands still for two and computes ten conversations for half a second each.
    trained = found.rollouts_per_s * 100 * 0.1
    steps_per_s = found.busy["trainer"] / 10.0
    assert trained == pytest.approx(1 - steps_per_s * (2.0 + 10 * 0.5), rel=0.05)
