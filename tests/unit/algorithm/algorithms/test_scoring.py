"""Scoring turns finished rollouts into a number for each token, however a rollout was cut into rows."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.trajectories import attach, trajectory, unit_rewards
from fulmen.trajectories.rewards import AttemptReward
from fulmen_algorithm.algorithms.scoring import ScoredRollout, Scorer
from fulmen_algorithm.clients.decode import rollout_trajectory
from fulmen_algorithm.losses.advantage_settings import ScoringSettings
from fulmen_algorithm.rollouts.groups import FinishedRollout
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.failure import RunFailed
from tests.support.algorithm.scored_rollouts import FINAL, rollout, sequence, settings_of, team
from tests.support.sdk.trajectory_cases import attempts, chunk_of, plain, records_of


def with_steps(name: str, final: float, *steps: float) -> FinishedRollout:
    made = rollout(name, final)
    return replace(made, rewards={**made.rewards, **{("reward", n, b""): value for n, value in enumerate(steps)}})


def calls_of(turns: int, *, agent: str = "") -> list:
    """An agent that asks `turns` times and keeps the conversation: one row."""
    calls, prompt = [], [1, 1]
    for turn in range(turns):
        calls.append(plain(prompt, [2, 3], agent_name=agent))
        prompt = [*prompt, 2, 3, 5 + turn]
    return calls


def read(calls: list) -> RolloutTrajectory:
    return rollout_trajectory([chunk_of(records_of(calls, []))])


def test_a_rollout_is_truncated_whichever_of_its_calls_was():
    first, last = calls_of(2)
    assert len(read([first, last]).sequences) == 1
    assert not read([first, last]).truncated
    assert read([first, replace(last, finish_reason="length")]).truncated
    assert read([replace(first, finish_reason="length"), last]).truncated


def numbers(
    members: list[tuple[FinishedRollout, RolloutTrajectory]], scoring: ScoringSettings
) -> dict[str, list[tuple[float, ...]]]:
    """Returns each row's numbers, by rollout."""
    scorer = Scorer(scoring)
    scored = [scorer.score("g", r, t) for r, t in members]
    found: dict[str, list[tuple[float, ...]]] = {}
    for each in scorer.numbers(scored):
        found.setdefault(each.rollout.name, []).append(each.rewards or each.advantages)
    return found


def sampled(values: tuple[float, ...], of: TokenSequence) -> list[float]:
    return [value for value, trains in zip(values, of.loss_mask, strict=True) if trains]


@pytest.mark.parametrize("kind", ["group", "rloo", "opo", "maxrl", "reinforce_pp", "gae"])
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.lists(st.integers(1, 3), min_size=1, max_size=4)), min_size=2, max_size=4),
    st.integers(0, 99),
)
def test_into_how_many_rows_a_rollout_was_cut_changes_nothing(kind, rollouts, seed):
    chance = random.Random(seed)
    cut, whole = [], []
    for index, (reward, turns) in enumerate(rollouts):
        calls = [(unit, tokens) for unit, tokens in enumerate(turns)]
        pieces, rest = [], calls
        while rest:
            size = chance.randint(1, len(rest))
            pieces.append(sequence("", *rest[:size]))
            rest = rest[size:]
        made = rollout(str(index), reward)
        whole.append((made, RolloutTrajectory(sequences=(sequence("", *calls),))))
        cut.append((made, RolloutTrajectory(sequences=tuple(pieces))))
    scoring = settings_of(advantage={"kind": kind})
    together, apart = numbers(whole, scoring), numbers(cut, scoring)
    for (made, one), (_, many) in zip(whole, cut, strict=True):
        expected = sampled(together[made.name][0], one.sequences[0])
        found = [x for values, s in zip(apart[made.name], many.sequences, strict=True) for x in sampled(values, s)]
        assert found == pytest.approx(expected)


def test_tokens_that_were_read_have_no_advantage_and_rows_keep_their_role():
    found = numbers([(rollout("a", 1.0), read(calls_of(2))), (rollout("b", 0.0), read(calls_of(1)))], settings_of())
    assert found["a"] == [(0, 0, 0.5, 0.5, 0, 0.5, 0.5)]
    assert found["b"] == [(0, 0, -0.5, -0.5)]
    assert [s.role for s in read(calls_of(1, agent="planner")).sequences] == ["planner"]


def test_rewards_of_several_dimensions_are_weighed_and_one_that_is_missing_is_never_taken_for_zero():
    scorer = Scorer(settings_of(rewards={"weights": {"correct": 2.0, "style": 0.5}}))
    assert scorer.total(rollout("a", correct=1.0, style=1.0, speed=9.0)) == 2.5
    lacking = rollout("b", correct=1.0)
    assert scorer.total(lacking) is None
    assert scorer.missing(lacking) == "no reward in style"
    assert Scorer(settings_of()).missing(lacking) == "no reward"
    members = [
        (rollout("a", correct=1.0, style=0.0), read(calls_of(1))),
        (rollout("b", correct=0.0, style=1.0), read(calls_of(1))),
    ]
    assert numbers(members, scorer._settings)["a"][0][2] == pytest.approx(0.75)
    scored = [scorer.score("g", r, t) for r, t in members]
    assert scorer.metrics(scored) == {"reward_correct_mean": 0.5, "reward_style_mean": 0.5}


def test_a_group_of_equal_rewards_has_no_signal_unless_lengths_are_punished():
    members = [(rollout("a", 1.0), read(calls_of(2))), (rollout("b", 1.0), read(calls_of(1)))]
    plain_scorer = Scorer(settings_of())
    assert not plain_scorer.may_train([r for r, _ in members])
    assert not plain_scorer.has_signal([plain_scorer.score("g", r, t) for r, t in members])
    scorer = Scorer(settings_of(overlong={"max_tokens": 4, "buffer_tokens": 2}))
    assert scorer.may_train([r for r, _ in members])
    scored = [scorer.score("g", r, t) for r, t in members]
    assert scorer.has_signal(scored)
    # Four sampled tokens: in the soft zone to the end; two: free.
    assert [s.overlong for s in scored] == [-1.0, 0.0]
    assert numbers(members, scorer._settings)["a"][0][2] == -0.5


def test_a_critic_or_a_batch_is_compared_with_so_one_rollout_is_a_group():
    for advantage in ({"kind": "gae"}, {"kind": "reinforce_pp"}):
        scorer = Scorer(settings_of(advantage=advantage))
        assert scorer.min_rollouts == 1
        assert scorer.may_train([rollout("a", 1.0)])
        assert scorer.has_signal([scorer.score("g", rollout("a", 1.0), read(calls_of(1)))])
    assert Scorer(settings_of()).min_rollouts == 2


def test_steps_have_the_credit_that_the_sdk_gives_them():
    members = [(with_steps("a", 1.0, 0.5, 0.25), read(calls_of(2))), (with_steps("b", 0.0, 0.0), read(calls_of(1)))]
    found = numbers(members, settings_of(credit={"kind": "step_return", "gamma": 0.5}))
    returns = [0.5 + 0.5 * (0.25 + 1.0), 0.25 + 1.0, 0.0]
    expected = [r - sum(returns) / 3 for r in returns]
    first, second, other = expected
    assert found["a"][0] == pytest.approx((0, 0, first, first, 0, second, second))
    assert found["b"][0] == pytest.approx((0, 0, other, other))


def test_a_critic_gets_the_rewards_of_steps_at_their_last_tokens_and_the_order_of_steps():
    scorer = Scorer(settings_of(advantage={"kind": "gae"}, credit={"kind": "step_return"}))
    [found] = scorer.numbers([scorer.score("g", with_steps("a", 1.0, 0.5, 0.25), read(calls_of(2)))])
    assert found.rewards == (0, 0, 0, 0.5, 0, 0, 1.25)
    assert found.steps == (0, 0, 0, 0, 0, 1, 1)
    assert not any(found.advantages)


def test_steps_that_began_alike_are_compared_with_each_other():
    # Both read the same question; the second turn of "a" stands alone.
    members = [(with_steps("a", 1.0, 0.0, 0.0), read(calls_of(2))), (with_steps("b", 0.0, 0.0), read(calls_of(1)))]
    found = numbers(members, settings_of(credit={"kind": "step_groups", "gamma": 0.5, "weight": 1.0}))
    assert found["a"][0] == pytest.approx((0, 0, 0.5 + 0.25, 0.5 + 0.25, 0, 0.5, 0.5))
    assert found["b"][0][2] == pytest.approx(-0.75)


def test_a_rollout_without_calls_has_no_credit_by_step():
    scorer = Scorer(settings_of(credit={"kind": "step_return"}))
    assert scorer.problem(RolloutTrajectory(sequences=(sequence("", (0, 1)),)))
    assert not scorer.problem(read(calls_of(1)))


def test_a_role_with_rewards_of_its_own_is_compared_with_its_like():
    roles = {"baseline": "role", "rewards": {"planner": "plan"}}
    members = [team("a", 1.0, 0.2, 2), team("b", 0.0, 0.6, 1), team("c", 0.5, None, 0)]
    found = numbers(members, settings_of(roles=roles))
    assert found["a"][0] == pytest.approx((0, -0.2, -0.2))
    assert found["a"][1:] == [(0, 0.5), (0, 0.5)]
    assert found["b"] == [pytest.approx((0, 0.2, 0.2)), (0, -0.5)]
    # No reward of the planner's, and nobody else: nothing is taken for zero.
    assert "c" not in found
    metrics = Scorer(settings_of(roles=roles)).metrics(
        [Scorer(settings_of(roles=roles)).score("g", r, t) for r, t in members]
    )
    assert metrics["role_planner_rows"] == 3
    assert metrics["role_worker_tokens"] == 3
    assert metrics["role_planner_reward_mean"] == pytest.approx(0.4)


def test_only_the_roles_that_are_named_train_and_all_share_the_advantage_of_the_rollout():
    members = [team("a", 1.0, None, 2), team("b", 0.0, None, 1)]
    everyone = numbers(members, settings_of())
    assert everyone["a"] == [(0, 0.5, 0.5), (0, 0.5), (0, 0.5)]
    planners = numbers(members, settings_of(roles={"train": ("planner",)}))
    assert planners["a"] == [(0, 0.5, 0.5)]
    assert Scorer(settings_of(roles={"train": ("critic",)})).problem(members[0][1])


def test_a_reward_of_a_step_that_is_gone_goes_to_the_one_before_it():
    scorer = Scorer(settings_of(advantage={"kind": "gae"}, credit={"kind": "step_return"}))
    scored = ScoredRollout(
        name="a",
        group="g",
        rewards={},
        role_rewards={},
        sequences=(sequence("", (0, 1), (2, 1)),),
        credits=((0.0, 0.0),),
        unit_rewards=(0.1, 0.2, 0.4, 1.0),
    )
    [found] = scorer.numbers([scored])
    assert found.rewards == pytest.approx((0, 0.3, 0, 1.4))


def test_rewards_for_which_an_estimator_is_not_defined_fail_the_run_in_words():
    scorer = Scorer(settings_of(advantage={"kind": "maxrl"}))
    scored = [scorer.score("g", rollout(n, r), read(calls_of(1))) for n, r in (("a", -1.0), ("b", 1.0))]
    with pytest.raises(RunFailed, match="maxrl needs rewards of 0 or more"):
        scorer.has_signal(scored)


@given(attempts(), st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2)), max_size=4), st.floats(-2, 2))
def test_units_earn_every_attached_reward_once(world, steps, final):
    calls, spans = world
    rewards = {("reward", n, b""): value for n, value in steps} | {FINAL: final}
    given_rewards = [AttemptReward(value=v, dimension=d, step=n) for (d, n, _), v in rewards.items()]
    scored = attach(trajectory([chunk_of(records_of(calls, spans))]), given_rewards)
    lost = {each.reward for each in scored.unattached}
    expected = math.fsum(r.value for r in given_rewards if r not in lost) if scored.rows else 0.0
    assert math.fsum(unit_rewards(scored).rewards) == pytest.approx(expected)
