"""A policy that is trained on the scores of a reward model gives better answers; what cannot score it is refused."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.options.model_rewards import ModelRewards
from fulmen_algorithm.algorithms.options.model_rewards_settings import RewardModelUse
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import created, run_folder, with_settings
from tests.support.algorithm.training import read_consumed

LEARNS = {
    "batch_size": 16, "report_every": 20, "checkpoint_every": 60, "learning_rate": 0.01, "held_out": 0.2,
    "schedule": "constant", "warmup_steps": 0, "steps": 60, "pairs_per_group": 2, "min_gap": 0.3,
}  # fmt: skip
OTHER = "projects/default/trainingRuns/other"
HIGH = range(11, 16)
"""Tokens of the digits from 5 to 9; rollouts of the world are of digits at random."""


def answer_of(world: World, name: str) -> list[int]:
    """The sampled digits of a rollout of the world, which depend on its name alone."""
    chance = random.Random(f"{name}/attempts/1")
    [chance.randrange(6, 16) for _ in range(3)]
    return [chance.randrange(6, 16) for _ in range(world.answer_tokens - 1)]


def true_score(world: World, name: str) -> float:
    """The share of high digits."""
    digits = answer_of(world, name)
    return sum(token in HIGH for token in digits) / len(digits)


def stored_groups(world: World, groups: int = 64, size: int = 4) -> None:
    """Stores rollouts of another run with their true scores."""
    made = []
    for group in range(groups):
        names = [f"projects/default/rollouts/other-{group}.{n}" for n in range(size)]
        rollouts = tuple(
            FinishedRollout(name=n, attempt=f"{n}/attempts/1", succeeded=True, reward=true_score(world, n))
            for n in names
        )
        made.append(FinishedGroup(group_id=f"train/{group}", rollouts=rollouts, cursor=""))
    world.others[OTHER] = made
    world.sampled_with |= {r.attempt: 1 for group in made for r in group.rollouts}


def share_of_high(folder: Path) -> float:
    """The probability of a high digit among digits, at the first token of an answer, over prompts at random."""
    policy, chance, found = PolicyModel.load(folder), random.Random(5), []
    for _ in range(8):
        prompt = [4, *(chance.randrange(6, 16) for _ in range(3))]
        rows = [
            row_from_completion(
                rollout_id="r", prompt_ids=prompt, completion_ids=[token], logprobs=[0.0], advantage=0.0, version=0
            )
            for token in range(6, 16)
        ]
        shares = np.exp([each[-1] for each in logprobs_of(policy, rows, settings=StepSettings(token_budget=256))])
        found.append(shares[-len(HIGH) :].sum() / shares.sum())
    return float(np.mean(found))


async def judge_of_stored_groups(world: World, draft: RunDraft, carry_out) -> None:
    stored_groups(world)
    judge = replace(
        draft,
        name="projects/default/trainingRuns/judge",
        algorithm="reward_model",
        policy=replace(draft.policy, name="judge"),
        inputs={"rollouts": OTHER},
        settings_json=json.dumps(LEARNS),
    )
    results = (await carry_out(judge)).run.results
    assert results["validation_accuracy_after"] >= 0.8


async def test_a_policy_that_is_trained_on_scores_alone_gives_better_answers(
    world, sft_draft, grpo_draft, carry_out, tiny_model, tmp_path
):
    # In order, as the store hands them out: no rollout is older than it need be.
    world.answer_tokens, world.reward_of, world.in_order = 5, lambda _: 0.0, True
    await judge_of_stored_groups(world, sft_draft, carry_out)
    draft = with_settings(
        grpo_draft, steps=12, group_size=8, prompts_per_step=4, minibatches=1, learning_rate=0.02, warmup_steps=0,
        reward_model={"model": "judge@1"},
    )  # fmt: skip
    before = share_of_high(tiny_model)
    entry = await carry_out(draft)
    after = share_of_high(Path(entry.run.model_path))
    assert before < 0.65
    assert after > before + 0.25
    metrics = [s.values for s in entry.events.steps() if "reward_model_mean" in s.values]
    assert all(m["reward_own_mean"] == 0.0 and m["reward_model_std"] > 0 for m in metrics)
    assert metrics[-1]["reward_mean"] == pytest.approx(metrics[-1]["reward_model_mean"])
    # The score of each rollout is kept, and goes with what is true.
    scores = {
        name: score for line in read_consumed(run_folder(tmp_path)) for name, score in line["reward_model"].items()
    }
    assert len(scores) == 12 * 4 * 8
    truth = [true_score(world, name) for name in scores]
    assert np.corrcoef(truth, list(scores.values()))[0, 1] > 0.5


SCORED = {"reward_model": {"model": "judge@1"}}


def published_judge(world: World, folder: Path, **more: object) -> None:
    """Publishes a reward model of a folder, as the algorithm does."""
    described = {"kind": "full", "path": str(folder), "sha256": "", "purpose": "reward_model", **more}
    world.add_resource("resources/policy.judge", json.dumps(described).encode())


async def problems_of(draft: RunDraft, world: World) -> str:
    with pytest.raises(SettingsInvalid) as caught:
        await created(draft, world)
    return "\n".join(f"{v.field}: {v.description}" for v in caught.value.violations)


def with_other_tokens(folder: Path, tiny_model: Path) -> Path:
    """Copies the model; two tokens have changed places."""
    shutil.copytree(tiny_model, folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    known = told["model"]["vocab"]
    known["7"], known["8"] = known["8"], known["7"]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder


async def test_what_cannot_score_is_refused_before_the_run_exists(world, grpo_draft, tiny_model, tmp_path):
    draft = with_settings(grpo_draft, **SCORED)
    missing = await problems_of(draft, world)
    assert "settings.reward_model: there is no resources/policy.judge/versions/1 in the project" in missing
    published_judge(world, tiny_model, purpose="")
    assert "is not a reward model: train one with the algorithm reward_model" in await problems_of(draft, world)
    published_judge(world, with_other_tokens(tmp_path / "other", tiny_model))
    second = with_settings(grpo_draft, reward_model={"model": "judge@2"})
    assert "judge/versions/2 must have the tokenizer of the policy" in await problems_of(second, world)
    published_judge(world, tiny_model)
    await created(with_settings(grpo_draft, reward_model={"model": "judge@3"}), world)


async def test_another_tokenizer_that_could_not_be_read_before_ends_the_run_at_its_start(
    world, grpo_draft, carry_out, tiny_model, tmp_path
):
    # Where the run's files are is not known to who checks the draft.
    with_other_tokens(tmp_path / "state/runs/default/judge/model", tiny_model)
    published_judge(world, Path("model"), path="runs:/default/judge/model")
    entry = await carry_out(with_settings(grpo_draft, **SCORED), state=RunState.FAILED)
    assert "must have the tokenizer of the policy" in entry.run.failure_message
    assert not world.groups, "no rollout was made"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"reward_model": {"model": "judge"}}, "settings.reward_model.model"),
        ({"reward_model": {"model": "judge@1", "coefficient": 0}}, "settings.reward_model.coefficient"),
        ({**SCORED, "credit": {"kind": "step_groups"}}, "scores whole rollouts, which credit step_groups splits"),
        ({**SCORED, "rewards": {"weights": {"reward": 1.0}}}, "rewards.weights has no reward_model"),
        ({**SCORED, "curriculum": {"kind": "difficulty"}}, "a reward model's scores are unbounded"),
    ],
)
async def test_settings_that_do_not_fit_a_reward_model_are_refused(settings, problem, world, grpo_draft):
    assert problem in await problems_of(with_settings(grpo_draft, **settings), world)


async def test_scores_have_a_weight_beside_the_rewards_of_agent_and_grader(world, grpo_draft, carry_out, tiny_model):
    published_judge(world, tiny_model)
    world.reward_of = lambda _: 1.0
    draft = with_settings(grpo_draft, steps=1, reward_model={"model": "judge@1", "coefficient": 0.5})
    metrics = (await carry_out(draft)).events.steps()[-1].values
    assert metrics["reward_own_mean"] == 1.0
    assert metrics["reward_mean"] == pytest.approx(1.0 + 0.5 * metrics["reward_model_mean"])
    assert metrics["optimizer_steps"] == 1, "groups of equal rewards are told apart by their scores"


async def test_as_a_dimension_the_score_has_the_weight_of_rewards_weights(world, grpo_draft, carry_out, tiny_model):
    published_judge(world, tiny_model)
    weights = {"reward": 1.0, "reward_model": 2.0}
    draft = with_settings(grpo_draft, steps=1, **SCORED, rewards={"weights": weights})
    metrics = (await carry_out(draft)).events.steps()[-1].values
    assert metrics["reward_mean"] == pytest.approx(metrics["reward_own_mean"] + 2 * metrics["reward_model_mean"])
    assert "reward_reward_model_mean" in metrics


async def test_a_rollout_too_long_to_be_scored_has_no_reward_and_is_counted(world, grpo_draft, carry_out, tiny_model):
    published_judge(world, tiny_model)
    # 4 tokens of the prompt; with one more to compare, one of each group is beyond the budget.
    world.tokens_of = lambda name: 12 if name.endswith(".1") else 2
    draft = with_settings(grpo_draft, steps=1, token_budget=16, **SCORED)
    metrics = (await carry_out(draft)).events.steps()[-1].values
    assert metrics["reward_model_unscored"] == metrics["rollouts"] / 3


def test_a_score_that_is_not_finite_is_none(tiny_model) -> None:
    policy = PolicyModel.load(tiny_model)
    use = ModelRewards(
        cast(Any, SimpleNamespace(policy=policy)), RewardModelUse(model="judge@1", coefficient=1e300), token_budget=64
    )
    rollout = FinishedRollout(name="r", attempt="r/attempts/1", succeeded=True, reward=1.0)
    for score in (float("nan"), float("inf"), -float("inf"), 1e300):
        assert use._scored(rollout, score).reward is None
    assert use._scored(rollout, 0.0).reward == 1.0
    assert use.end_step() == {
        "reward_model_unscored": 4.0,
        "reward_model_mean": 0.0,
        "reward_model_std": 0.0,
        "reward_own_mean": 1.0,
    }
