"""Every estimator against the formula of its paper (reference_advantages.py), against TRL, and by its properties."""

import ast
import random
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fulmen_algorithm.losses.advantage_settings import (
    GaeAdvantage,
    GroupAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    OverlongSettings,
    ReinforcePpAdvantage,
    RewardSettings,
    RlooAdvantage,
    ScoringSettings,
    StepGroupsCredit,
    StepReturnCredit,
)
from fulmen_algorithm.losses.advantages import Sample, Step, has_signal, token_advantages
from tests.support.algorithm import reference_advantages as paper

REWARD = st.floats(min_value=0, max_value=100, allow_nan=False).map(lambda r: round(r, 3))
GROUPS = st.lists(st.lists(st.tuples(REWARD, st.integers(1, 5)), min_size=2, max_size=6), min_size=1, max_size=5)
ESTIMATORS = [
    GroupAdvantage(),
    GroupAdvantage(std="group"),
    GroupAdvantage(std="batch"),
    RlooAdvantage(),
    OpoAdvantage(),
    MaxRlAdvantage(),
    ReinforcePpAdvantage(),
    ReinforcePpAdvantage(gamma=0.5),
    ReinforcePpAdvantage(baseline="group"),
]
ZERO_SUM = [GroupAdvantage(), GroupAdvantage(std="group"), RlooAdvantage(), MaxRlAdvantage()]


def samples_of(groups: list[list[tuple[float, int]]]) -> list[Sample]:
    return [
        Sample(key=f"{g}-{i}", group=str(g), rewards={"reward": reward}, tokens=tokens)
        for g, group in enumerate(groups)
        for i, (reward, tokens) in enumerate(group)
    ]


def close(found: list, expected: list) -> None:
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-9, atol=1e-9)


def expected_of(groups: list[list[tuple[float, int]]], advantage) -> list[list[float]]:
    rewards = [[r for r, _ in group] for group in groups]
    lengths = [n for group in groups for _, n in group]
    match advantage:
        case GroupAdvantage(std=scale):
            each = paper.grpo(rewards, scale=scale)
        case RlooAdvantage():
            each = paper.rloo(rewards)
        case OpoAdvantage():
            each = paper.opo(rewards, [[n for _, n in group] for group in groups])
        case MaxRlAdvantage():
            each = paper.maxrl(rewards)
        case ReinforcePpAdvantage(baseline=baseline, gamma=gamma):
            flat = paper.grpo(rewards, scale="none") if baseline == "group" else [r for group in rewards for r in group]
            return paper.reinforce_pp([[0.0] * (n - 1) + [r] for r, n in zip(flat, lengths, strict=True)], gamma)
    return [[a] * n for a, n in zip(each, lengths, strict=True)]


@pytest.mark.parametrize("advantage", ESTIMATORS, ids=str)
@settings(max_examples=25)
@given(GROUPS)
def test_advantages_equal_the_formula_of_the_paper(advantage, groups):
    if len({r for group in groups for r, _ in group}) < 2:
        return
    # A spread of the last bits, divided by itself, is the one place where two ways of adding up may differ.
    groups = [g if len({r for r, _ in g}) > 1 else [(5.0, n) for _, n in g] for g in groups]
    close(token_advantages(samples_of(groups), ScoringSettings(advantage=advantage)), expected_of(groups, advantage))


@pytest.mark.parametrize("advantage", ESTIMATORS, ids=str)
@given(groups=GROUPS, seed=st.integers(0, 99))
@settings(max_examples=15)
def test_the_order_of_groups_and_rollouts_changes_nothing(advantage, groups, seed):
    samples = samples_of(groups)
    scoring = ScoringSettings(advantage=advantage)
    before = {s.key: a for s, a in zip(samples, token_advantages(samples, scoring), strict=True)}
    random.Random(seed).shuffle(samples)
    for sample, found in zip(samples, token_advantages(samples, scoring), strict=True):
        np.testing.assert_allclose(found, before[sample.key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("advantage", ZERO_SUM, ids=str)
@settings(max_examples=15)
@given(GROUPS)
def test_the_advantages_of_a_group_sum_to_zero(advantage, groups):
    found = iter(token_advantages(samples_of(groups), ScoringSettings(advantage=advantage)))
    for group in groups:
        assert sum(float(next(found)[0]) for _ in group) == pytest.approx(0, abs=1e-6)


@settings(max_examples=15)
@given(GROUPS)
def test_those_of_opo_sum_to_zero_by_length(groups):
    found = iter(token_advantages(samples_of(groups), ScoringSettings(advantage=OpoAdvantage())))
    for group in groups:
        assert sum(float(next(found).sum()) for _ in group) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("advantage", ESTIMATORS, ids=str)
def test_equal_rewards_give_exactly_nothing(advantage):
    # 0.1 is no binary fraction: the mean of three of them is not 0.1.
    samples = samples_of([[(0.1, 2), (0.1, 2), (0.1, 2)]] * 3)
    scoring = ScoringSettings(advantage=advantage.model_copy(update={"gamma": 1.0}))
    assert all((values == 0.0).all() for values in token_advantages(samples, scoring))
    compared = not isinstance(advantage, ReinforcePpAdvantage) or advantage.baseline == "group"
    assert has_signal(samples, scoring) is not compared


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.tuples(REWARD, REWARD), min_size=2, max_size=5), min_size=2, max_size=4),
    st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
)
def test_gdpo_equals_the_formula_of_the_paper(groups, weights):
    samples = [
        Sample(key=f"{g}-{i}", group=g, rewards={"a": a, "b": b}, tokens=1)
        for g, group in enumerate(groups)
        for i, (a, b) in enumerate(group)
    ]
    if any(len({r[k] for r in group}) < 2 for group in groups for k in (0, 1)):
        return
    rewards = RewardSettings(weights=dict(zip("ab", weights, strict=True)), normalise="gdpo")
    found = token_advantages(samples, ScoringSettings(rewards=rewards))
    close(found, [[a] for a in paper.gdpo(groups, weights)])


def penalised(rewards: list[dict[str, float]], overlong: list[float]) -> list[Sample]:
    return [
        Sample(key=str(i), group="g", rewards=each, overlong=penalty, tokens=1)
        for i, (each, penalty) in enumerate(zip(rewards, overlong, strict=True))
    ]


TWO_WEIGHTS = RewardSettings(weights={"a": 1.0, "b": 1.0}, normalise="gdpo")


def test_a_small_penalty_for_length_does_not_make_the_best_answer_the_worst():
    rewards = [{"a": 1.0, "b": 1.0}, {"a": 0.8, "b": 0.8}, {"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.4}]
    scoring = ScoringSettings(rewards=TWO_WEIGHTS)
    without = [float(a[0]) for a in token_advantages(penalised(rewards, [0.0] * 4), scoring)]
    found = [float(a[0]) for a in token_advantages(penalised(rewards, [-0.001, 0.0, 0.0, 0.0]), scoring)]
    assert found == pytest.approx(without, abs=0.002)
    assert sorted(found, reverse=True) == found


@given(st.lists(st.tuples(REWARD, REWARD, st.floats(-1, 0)), min_size=2, max_size=6))
def test_a_penalty_changes_what_gdpo_normalises_by_its_own_size_and_no_more(rollouts):
    rewards, overlong = [{"a": a, "b": b} for a, b, _ in rollouts], [penalty for *_, penalty in rollouts]
    scoring = ScoringSettings(rewards=TWO_WEIGHTS)
    without = np.concatenate(token_advantages(penalised(rewards, [0.0] * len(rollouts)), scoring))
    found = np.concatenate(token_advantages(penalised(rewards, overlong), scoring))
    np.testing.assert_allclose(found - without, np.array(overlong) - np.mean(overlong), atol=1e-9)


def test_a_penalty_for_length_makes_no_reward_negative_for_maxrl():
    scoring = ScoringSettings(advantage=MaxRlAdvantage())
    found = token_advantages(penalised([{"reward": 0.0}, {"reward": 1.0}], [-0.5, 0.0]), scoring)
    close(found, [[-1.0 - 0.25], [1.0 + 0.25]])


def trl_advantages(trainer: str, until: str, start: str, **names: object) -> list[float]:
    """Runs the lines of TRL's trainer that compute advantages, with our epsilon and population standard deviation."""
    package = find_spec("trl")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "trainer" / trainer).read_text().splitlines()
    first = next(i for i, line in enumerate(source) if line.strip().startswith(start))
    last = next(i for i in range(first, len(source)) if source[i].strip().startswith(until))
    code = textwrap.dedent("\n".join(source[first:last])).replace("1e-4", "1e-6")
    ast.parse(code)

    def nanstd(tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        return tensor.std(dim=dim, correction=0, keepdim=keepdim)

    space = {"torch": torch, "nanstd": nanstd, "device": "cpu", **names}
    exec(code, space)
    return space["advantages"].tolist()


def trl_grpo(rewards: list[list[float]], *, size: int, weights: list[float], how: str, scale: str) -> list[float]:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    trainer = SimpleNamespace(
        multi_objective_aggregation=how,
        reward_weights=torch.tensor(weights, dtype=torch.float64),
        reward_funcs=weights,
        scale_rewards=scale,
    )
    return trl_advantages(
        "grpo_trainer.py", "advantages = torch.nan_to_num", "if self.multi_objective_aggregation ==",
        self=trainer, rewards_per_func=tensor, num_generations=size, unscorable_mask=torch.isnan(tensor).all(dim=1),
    )  # fmt: skip


TWO_DIMENSIONS = [[random.Random(i).uniform(0, 2), float(i % 3)] for i in range(12)]


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_group_advantages_equal_trls(scale):
    weights = {"a": 0.7, "b": 1.5}
    samples = [
        Sample(key=str(i), group=i // 4, rewards={"a": a, "b": b}, tokens=1) for i, (a, b) in enumerate(TWO_DIMENSIONS)
    ]
    scoring = ScoringSettings(advantage=GroupAdvantage(std=scale), rewards=RewardSettings(weights=weights))
    expected = trl_grpo(TWO_DIMENSIONS, size=4, weights=list(weights.values()), how="sum_then_normalize", scale=scale)
    close(token_advantages(samples, scoring), [[a] for a in expected])


def test_gdpo_equals_trls():
    weights = {"a": 0.7, "b": 1.5}
    samples = [
        Sample(key=str(i), group=i // 4, rewards={"a": a, "b": b}, tokens=1) for i, (a, b) in enumerate(TWO_DIMENSIONS)
    ]
    scoring = ScoringSettings(rewards=RewardSettings(weights=weights, normalise="gdpo"))
    expected = trl_grpo(TWO_DIMENSIONS, size=4, weights=[0.7, 1.5], how="normalize_then_sum", scale="group")
    close(token_advantages(samples, scoring), [[a] for a in expected])


def test_rloo_equals_trls():
    rewards = [a for a, _ in TWO_DIMENSIONS]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = trl_advantages(
        "rloo_trainer.py", "advantages = torch.nan_to_num", "grouped_rewards = rewards.view(-1, num_generations)",
        self=SimpleNamespace(normalize_advantages=False), rewards=tensor, num_generations=4,
    )  # fmt: skip
    samples = [Sample(key=str(i), group=i // 4, rewards={"reward": r}, tokens=1) for i, r in enumerate(rewards)]
    close(token_advantages(samples, ScoringSettings(advantage=RlooAdvantage())), [[a] for a in expected])


def stepped(key: str, group: str, steps: list[tuple[float, str]], tokens: int = 2) -> Sample:
    made = tuple(
        Step(unit=unit, tokens=tokens, reward=credit, credit=credit, anchor=anchor)
        for unit, (credit, anchor) in enumerate(steps)
    )
    return Sample(key=key, group=group, rewards={"reward": steps[0][0]}, tokens=tokens * len(steps), steps=made)


TREE = [
    [[(1.0, "s"), (1.0, "x"), (1.0, "end")], [(0.0, "s"), (0.0, "x")], [(0.5, "s"), (0.25, "y")]],
    [[(2.0, "s"), (1.0, "x")], [(0.0, "s"), (1.0, "z")]],
]


def test_step_groups_equal_the_formula_of_the_paper():
    samples = [stepped(f"{g}-{i}", str(g), steps) for g, group in enumerate(TREE) for i, steps in enumerate(group)]
    found = token_advantages(samples, ScoringSettings(credit=StepGroupsCredit(weight=0.5)))
    anchored = [[[(anchor, value) for value, anchor in steps] for steps in group] for group in TREE]
    expected = paper.gigpo(anchored, omega=0.5)
    close(found, [[a for a in row for _ in range(2)] for row in expected])


@pytest.mark.parametrize("baseline", ["group", "step"])
def test_credit_of_steps_is_centred_over_the_group_or_the_steps_of_the_same_number(baseline):
    samples = [stepped(f"{g}-{i}", str(g), steps) for g, group in enumerate(TREE) for i, steps in enumerate(group)]
    found = token_advantages(samples, ScoringSettings(credit=StepReturnCredit(baseline=baseline)))
    expected = []
    for group in TREE:
        everything = [value for steps in group for value, _ in steps]
        for steps in group:
            row = []
            for unit, (value, _) in enumerate(steps):
                alike = [other[unit][0] for other in group if len(other) > unit]
                over = alike if baseline == "step" and len(alike) > 1 else everything
                row += [value - paper.mean(over)] * 2
            expected.append(row)
    close(found, expected)


def test_with_a_critic_or_token_returns_every_step_is_rewarded_at_its_last_token():
    sample = stepped("a", "g", [(1.0, "s"), (0.5, "x")], tokens=3)
    scoring = ScoringSettings(advantage=GaeAdvantage(), credit=StepReturnCredit())
    assert token_advantages([sample], scoring)[0].tolist() == [0, 0, 1.0, 0, 0, 0.5]
    by_rollout = ScoringSettings(advantage=GaeAdvantage())
    assert token_advantages([sample], by_rollout)[0].tolist() == [0, 0, 0, 0, 0, 1.0]


@given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 20))
def test_the_penalty_for_length_equals_the_formula_of_the_paper(tokens, longest, buffer):
    if buffer > longest:
        with pytest.raises(ValidationError):
            OverlongSettings(max_tokens=longest, buffer_tokens=buffer)
        return
    shaping = OverlongSettings(max_tokens=longest, buffer_tokens=buffer)
    assert shaping.reward(tokens) == pytest.approx(paper.overlong(tokens, longest, buffer))


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample(key="a", group=0, rewards={"reward": float("nan")}, tokens=1)],
        [Sample(key="a", group=group, rewards={"reward": 1.0}, tokens=1) for group in range(2)],
    ],
)
def test_invalid_samples_are_refused(samples):
    with pytest.raises(ValueError, match="ample"):
        token_advantages(samples, ScoringSettings())


def test_maxrl_refuses_rewards_below_zero():
    with pytest.raises(ValueError, match="of 0 or more"):
        token_advantages(samples_of([[(-1.0, 1), (1.0, 1)]]), ScoringSettings(advantage=MaxRlAdvantage()))


@pytest.mark.parametrize(
    "values",
    [
        {"rewards": {"normalise": "gdpo"}},
        {"rewards": {"weights": {}}},
        {"rewards": {"weights": {"a": float("inf")}}},
        {"rewards": {"weights": {"overlong": 1.0}}},
        {"rewards": {"weights": {"a": 1.0}, "normalise": "gdpo"}, "advantage": {"kind": "rloo"}},
        {"credit": {"kind": "step_return", "option": "split", "gamma": 0.5}},
        {"credit": {"kind": "step_return"}, "advantage": {"kind": "opo"}},
        {"credit": {"kind": "step_groups"}, "advantage": {"kind": "gae"}},
        {"credit": {"kind": "step_return", "gamma": 0.5}, "advantage": {"kind": "gae"}},
        {"credit": {"kind": "step_return"}, "advantage": {"kind": "reinforce_pp", "baseline": "group"}},
        {"roles": {"rewards": {"planner": "plan"}}},
        {"roles": {"train": ["a"], "baseline": "role", "rewards": {"b": "plan"}}},
        {"roles": {"baseline": "role"}, "advantage": {"kind": "gae"}},
        {"advantage": {"kind": "group", "gamma": 1.0}},
    ],
)
def test_settings_that_do_not_fit_together_are_refused(values):
    with pytest.raises(ValidationError):
        ScoringSettings.model_validate(values)
