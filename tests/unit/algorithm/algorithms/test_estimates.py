"""Estimates of an evaluation, against enumeration and published figures."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.algorithms.evaluate import bootstrap, pass_at_k, wilson


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passed(drawn):
    samples, passed, k = drawn
    choices = list(combinations([i < passed for i in range(samples)], k))
    assert pass_at_k(samples=samples, passed=passed, k=k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_many_samples_does_not_overflow():
    expected = 1 - math.comb(990, 100) / math.comb(1000, 100)
    assert pass_at_k(samples=1000, passed=10, k=100) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(samples, passed, k):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(samples=samples, passed=passed, k=k)


@pytest.mark.parametrize(
    ("passed", "samples", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_proportion_is_the_published_one(passed, samples, low, high):
    found = wilson(passed=passed, samples=samples, confidence=0.95)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_bootstrap_interval_of_many_tasks_is_that_of_the_normal_distribution():
    values = list(np.random.default_rng(1).normal(3.0, 2.0, 400))
    found = bootstrap(values, confidence=0.95, resamples=4000, seed=0)
    half = 1.96 * float(np.std(values)) / math.sqrt(len(values))
    assert found.mean == pytest.approx(float(np.mean(values)))
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert found == bootstrap(values, confidence=0.95, resamples=4000, seed=0)
