"""Rewards of a step are told one by one, or in bins if there are many."""

from fulmen_algorithm.runs.rewards import MAX_VALUES, RewardDistribution, distribution


def test_few_rewards_are_counted_as_they_are():
    assert distribution([1.0, 0.0, 1.0, -0.5]) == RewardDistribution(values=[-0.5, 0.0, 1.0], counts=[1, 1, 2])
    assert distribution([]) is None
    assert distribution([float("nan")]) is None


def test_many_rewards_are_counted_in_bins_of_equal_width_and_none_is_lost():
    rewards = [number / 99 for number in range(100)]
    found = distribution(rewards)
    assert found is not None
    assert len(found.values) == MAX_VALUES
    assert sum(found.counts) == 100
    assert set(found.counts) == {5}
    assert abs(found.bin_width - 0.05) < 1e-9
    assert abs(found.values[0] - 0.025) < 1e-9
