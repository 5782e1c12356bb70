"""Agreement is what the literature computes by hand, and numpy by the definitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from uuid import UUID

import numpy as np
import pytest

from fulmen_store.annotations.agreement import Level, alpha, kappa
from fulmen_store.annotations.annotations import agreement_of

# Krippendorff (2011), C: four observers and twelve units; 0 stands for no value.
REFERENCE = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3],
        [0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0],
    ]
)
UNITS = [[float(value) for value in unit if value] for unit in REFERENCE.T]


@pytest.mark.parametrize(
    ("level", "expected"), [(Level.NOMINAL, 0.743), (Level.ORDINAL, 0.815), (Level.INTERVAL, 0.849)]
)
def test_alpha_is_that_of_krippendorffs_example(level: Level, expected: float) -> None:
    found = alpha(UNITS, level)
    assert found is not None
    assert round(found, 3) == expected


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("seed", range(5))
def test_alpha_is_that_of_the_coincidence_matrix(level: Level, seed: int) -> None:
    random = np.random.default_rng(seed)
    units = [random.integers(1, 6, random.integers(0, 6)).astype(float).tolist() for _ in range(40)]
    assert alpha(units, level) == pytest.approx(by_coincidences(units, level))


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("seed", range(5))
def test_kappa_is_that_of_the_table_of_both_raters(level: Level, seed: int) -> None:
    random = np.random.default_rng(seed)
    first = random.integers(1, 6, 60)
    second = np.clip(first + random.integers(-1, 2, 60), 1, 5)
    pairs = [(float(one), float(other)) for one, other in zip(first, second, strict=True)]
    assert kappa(pairs, level) == pytest.approx(by_table(pairs, level))


def test_kappa_of_two_who_agree_in_35_of_50_cases_is_that_of_the_textbook() -> None:
    pairs = [(1.0, 1.0)] * 20 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 10 + [(0.0, 0.0)] * 15
    assert kappa(pairs, Level.NOMINAL) == pytest.approx(0.4)


@pytest.mark.parametrize("level", list(Level))
def test_full_agreement_is_one_and_nothing_to_agree_on_is_none(level: Level) -> None:
    assert alpha([[1.0, 1.0], [2.0, 2.0]], level) == pytest.approx(1)
    assert kappa([(1.0, 1.0), (2.0, 2.0)], level) == pytest.approx(1)
    for nothing in ([], [[1.0], [2.0]], [[1.0, 1.0], [1.0, 1.0]]):
        assert alpha(nothing, level) is None
    assert kappa([], level) is None
    assert kappa([(1.0, 1.0)], level) is None


def test_values_of_any_size_keep_their_agreement() -> None:
    small = [[1.0, 2.0], [3.0, 3.0], [5.0, 4.0]]
    large = [[value * 1e-3 + 1e9 for value in unit] for unit in small]
    expected = alpha(small, Level.INTERVAL)
    assert expected is not None
    assert alpha(large, Level.INTERVAL) == pytest.approx(expected, rel=1e-3)


def test_the_authors_with_the_most_scores_are_compared_pair_by_pair() -> None:
    ids = [UUID(int=number) for number in range(30)]
    scores = [(ids[0], f"author{number:02}", 1.0) for number in range(25)]
    scores += [(rollout_id, author, float(rollout_id.int % 5)) for rollout_id in ids[1:] for author in ("ann", "bob")]
    found = agreement_of(scores, Level.INTERVAL)
    assert len(found.authors) == 20
    assert [author for author, _, _ in found.authors[:2]] == ["ann", "bob"]
    pair = found.pairs[0]
    assert (pair.author, pair.other, pair.rollout_count, pair.equal_share, pair.kappa) == ("ann", "bob", 29, 1.0, 1.0)
    assert found.alpha == pytest.approx(1)
    assert found.rollout_count == 30


def by_coincidences(units: Sequence[Sequence[float]], level: Level) -> float:
    """Returns alpha by the matrix of coincidences, as Krippendorff (2011) describes it."""
    values = sorted({value for unit in units if len(unit) > 1 for value in unit})
    matrix = np.zeros((len(values), len(values)))
    for unit in units:
        for one, other in itertools.permutations(range(len(unit)), 2):
            matrix[values.index(unit[one]), values.index(unit[other])] += 1 / (len(unit) - 1)
    totals = matrix.sum(axis=0)
    metric = squared(np.array(values), totals, level)
    expected = (np.outer(totals, totals) - np.diag(totals)) / (totals.sum() - 1)
    return float(1 - (matrix * metric).sum() / (expected * metric).sum())


def by_table(pairs: Sequence[tuple[float, float]], level: Level) -> float:
    """Returns kappa by the table of what both raters gave."""
    values = sorted({value for pair in pairs for value in pair})
    table = np.zeros((len(values), len(values)))
    for one, other in pairs:
        table[values.index(one), values.index(other)] += 1 / len(pairs)
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    metric = squared(np.array(values), (rows + columns) * len(pairs), level)
    return float(1 - (table * metric).sum() / (np.outer(rows, columns) * metric).sum())


def squared(values: np.ndarray, totals: np.ndarray, level: Level) -> np.ndarray:
    """Returns the squared distances of all pairs of values."""
    if level is Level.NOMINAL:
        return 1 - np.eye(len(values))
    if level is Level.ORDINAL:
        values = np.cumsum(totals) - totals / 2
    return (values[:, None] - values[None, :]) ** 2
