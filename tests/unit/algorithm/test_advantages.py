import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.training.advantages import STD_EPSILON, StdNormalisation, group_advantages, split_zero_variance

REWARD = st.floats(min_value=-100, max_value=100, allow_nan=False).map(lambda r: round(r, 3))
GROUPS = st.lists(st.lists(REWARD, min_size=2, max_size=8), min_size=1, max_size=6).map(
    lambda groups: {f"g{i}": {f"r{i}-{j}": r for j, r in enumerate(g)} for i, g in enumerate(groups)}
)


@given(GROUPS, st.sampled_from(StdNormalisation))
def test_every_group_has_zero_mean(groups, std):
    result = group_advantages(groups, std=std)
    for group in groups.values():
        assert sum(result.advantages[r] for r in group) == pytest.approx(0, abs=1e-3)
    assert set(result.advantages) == {r for g in groups.values() for r in g}


@given(GROUPS)
def test_groups_of_equal_rewards_are_reported_and_carry_exactly_nothing(groups):
    result = group_advantages(groups, std=StdNormalisation.GROUP)
    flat = {key for key, group in groups.items() if len(set(group.values())) == 1}
    assert set(result.zero_variance_groups) == flat
    assert all(result.advantages[r] == 0.0 for key in flat for r in groups[key])
    trains, rests = split_zero_variance(list(groups), result)
    assert set(rests) == flat
    assert len(trains) + len(rests) == len(groups)


@given(GROUPS, st.sampled_from(StdNormalisation))
def test_advantages_equal_the_written_formula(groups, std):
    result = group_advantages(groups, std=std)
    everything = np.array([r for g in groups.values() for r in g.values()], dtype=np.float64)
    for group in groups.values():
        rewards = np.array(list(group.values()), dtype=np.float64)
        expected = rewards - rewards.sum() / len(rewards)
        if std is StdNormalisation.GROUP:
            expected /= np.sqrt(((rewards - rewards.mean()) ** 2).mean()) + STD_EPSILON
        if std is StdNormalisation.BATCH:
            expected /= np.sqrt(((everything - everything.mean()) ** 2).mean()) + STD_EPSILON
        actual = np.array([result.advantages[r] for r in group])
        if len(set(group.values())) > 1:
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "groups",
    [{}, {"a": {"x": 1.0}}, {"a": {"x": 1.0, "y": float("nan")}}, {"a": {"x": 1, "y": 2}, "b": {"x": 1, "z": 2}}],
)
def test_groups_that_make_no_sense_are_refused(groups):
    with pytest.raises(ValueError, match=r"group|Group"):
        group_advantages(groups)
