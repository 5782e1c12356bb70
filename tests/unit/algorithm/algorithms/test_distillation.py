"""A teacher's signal: its formula, its gradient, what of it trains, and runs that have nothing else."""

import json
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.options.teacher import Teacher, rendered_hint
from fulmen_algorithm.algorithms.scoring import ScoredRollout, TokenNumbers
from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import policy_loss
from fulmen_algorithm.losses.objectives import ClipLoss, NoCorrection, Objective, ReinforceLoss
from fulmen_algorithm.rollouts.trajectory import TokenSequence
from fulmen_algorithm.runs.creation.rules import parse_settings
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import sft_step, train_step
from tests.support.algorithm.run_service import ALGORITHMS, check, kills, with_settings

TEACHER = {"kind": "model", "model": "teacher"}


class Control:
    """Stops nothing."""

    async def unless_stopped(self, work):
        return await work


class Context:
    control = Control()


def numbers(mu: list[float], *, advantage: float = 0.0, task: bytes = b"") -> TokenNumbers:
    """A prompt token, sampled tokens with these log-probabilities, and an observation after the first of them."""
    mask = (False, True, False, *(True,) * (len(mu) - 1))
    values = iter(mu)
    logprobs = tuple(next(values) if sampled else 0.0 for sampled in mask)
    ids = tuple(range(5, 5 + len(mask)))
    sequence = TokenSequence(token_ids=ids, loss_mask=mask, logprobs=logprobs, policy_versions=(1,) * len(mask))
    rollout = ScoredRollout(name="r", group="g", rewards={}, role_rewards={}, sequences=(sequence,), task=task)
    return TokenNumbers(rollout=rollout, sequence=sequence, advantages=tuple(advantage * s for s in mask))


async def guided(given: list[TokenNumbers], opinions: list[list[float] | None], coefficient: float = 1.0):
    async def scores(ctx, asked):
        assert list(asked) == given
        return opinions

    return await Teacher(Context(), scores, coefficient=coefficient).guided(given)


async def test_a_token_gets_minus_its_reverse_kl_on_top_of_its_advantage():
    given = [numbers([-1.0, -2.0], advantage=0.25), numbers([-0.5, -0.1], advantage=-1.0)]
    opinions = [[0.0, -3.0, -9.0, -1.5], None]
    found, metrics = await guided(given, opinions, coefficient=0.5)
    # The paper: reverse KL of a token is log pi - log teacher, and the advantage is minus that.
    assert found[0].advantages == pytest.approx((0.0, 0.25 - 0.5 * (-1.0 + 3.0), 0.0, 0.25 - 0.5 * (-2.0 + 1.5)))
    assert found[1] == given[1]
    assert metrics == {"teacher_reverse_kl": pytest.approx((2.0 - 0.5) / 2), "teacher_rows": 1.0}


def one_token_batch(logprobs: torch.Tensor, advantages: torch.Tensor) -> TokenBatch:
    """N rows of one trained token that the trained policy itself sampled."""
    held = logprobs.detach()[:, None]
    index = torch.arange(len(logprobs))[:, None]
    return TokenBatch(
        logprobs_BT=logprobs[:, None],
        proximal_BT=held,
        sampler_BT=held,
        advantages_BT=advantages[:, None],
        mask_BT=index >= 0,
        row_index_BT=index,
    )


@pytest.mark.parametrize("loss", [ClipLoss(), ReinforceLoss()], ids=lambda loss: loss.kind)
def test_the_expected_gradient_is_that_of_the_reverse_kl_of_gkd(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer  # it takes seconds, in every process of the tests

    chance = torch.Generator().manual_seed(3)
    student = torch.randn(1, 12, generator=chance, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 12, generator=chance, dtype=torch.float64)
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=1.0)
    (by_them,) = torch.autograd.grad(theirs, student)
    # Every token of the vocabulary, weighted by its probability: the expectation over what the student samples.
    logprobs = student[0].log_softmax(-1)
    advantages = (teacher[0].log_softmax(-1) - logprobs).detach()
    objective = Objective(loss=loss, correction=NoCorrection())
    weights = logprobs.detach().exp()[:, None]
    ours = policy_loss(one_token_batch(logprobs, advantages), weights_BT=weights, objective=objective)
    (by_us,) = torch.autograd.grad(ours, student)
    assert by_them.norm() > 0.1
    assert torch.allclose(by_us, by_them, atol=1e-10)


def test_value_and_gradient_of_sampled_tokens_are_those_of_trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.sdft.loss_utils import compute_sampled_token_self_distillation_loss as of_trl

    chance = torch.Generator().manual_seed(4)
    student = torch.randn(1, 7, 12, generator=chance, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 7, 12, generator=chance, dtype=torch.float64)
    sampled = torch.randint(12, (1, 7), generator=chance)
    theirs = of_trl(student, teacher, sampled, distillation_alpha=1.0).mean()
    picked, others = (x.log_softmax(-1).gather(-1, sampled[..., None])[0, :, 0] for x in (student, teacher))
    batch = one_token_batch(picked, (others - picked).detach())
    objective = Objective(loss=ReinforceLoss(), correction=NoCorrection())
    ours = policy_loss(batch, weights_BT=torch.full((7, 1), 1 / 7, dtype=torch.float64), objective=objective)
    assert ours.item() == pytest.approx(theirs.item())
    assert torch.allclose(*(torch.autograd.grad(x, student)[0] for x in (ours, theirs)))


async def test_a_run_needs_no_reward_and_uses_every_group_once_whenever_it_is_killed(
    world, grpo_draft, carry_out, tmp_path
):
    world.chance = random.Random(2)
    world.reward_of = lambda _: None  # type: ignore[assignment, return-value]
    world.score = lambda model, ids: [-2.5 if model == "teacher" else 0.0] * len(ids)
    draft = with_settings(grpo_draft, algorithm="distill", teacher=TEACHER, group_size=2)
    entry = await carry_out(draft, killed=kills(world.chance, calls=40, lives=2))
    check(tmp_path, world)
    steps = [each.values for each in entry.events.steps() if each.step]
    assert all(step["groups_trained"] == 2 and step["teacher_rows"] == step["rows"] == 4 for step in steps)
    # The world's answers have the log-probability -3 at each token.
    assert all(step["teacher_reverse_kl"] == pytest.approx(-0.5) for step in steps)
    assert all(step["tokens"] == step["rows"] * world.answer_tokens for step in steps)


async def test_groups_of_equal_rewards_train_by_their_teacher(world, grpo_draft, carry_out):
    world.reward_of = lambda _: 1.0
    world.score = lambda _, ids: [-1.0] * len(ids)
    entry = await carry_out(with_settings(grpo_draft, teacher=TEACHER, steps=1))
    [step] = [each.values for each in entry.events.steps() if each.step]
    assert (step["groups_trained"], step["reward_mean"]) == (2, 1.0)
    assert step["grad_norm"] > 0


@pytest.mark.parametrize("weights", ["initial", "present"])
async def test_the_policy_itself_with_a_hint_is_a_teacher(weights, world, grpo_draft, carry_out):
    # Every step takes the four groups that were submitted for it.
    world.in_order = True
    tasks = [{"question": f"{i}+1=", **({"solution": "1" * 9} if i % 2 else {})} for i in range(4)]
    world.add_resource("resources/dataset.train", "\n".join(map(json.dumps, tasks)).encode())
    draft = with_settings(
        grpo_draft,
        algorithm="distill",
        teacher={"kind": "self", "hint": "solution", "weights": weights},
        prompts_per_step=4,
        steps=2,
    )
    draft = replace(draft, inputs={**draft.inputs, "train_tasks": "resources/dataset.train/versions/2"})
    steps = [each.values for each in (await carry_out(draft)).events.steps() if each.step]
    # Half of the tasks have a hint.
    assert [(step["rows"], step["teacher_rows"]) for step in steps] == [(12, 6)] * 2
    assert all(abs(step["teacher_reverse_kl"]) > 0 for step in steps)


async def test_a_hint_is_read_before_the_row(world, grpo_draft, carry_out, tiny_model, monkeypatch):
    policy, seen = PolicyModel.load(tiny_model), []
    prefix = rendered_hint(policy.tokenizer, "12")
    monkeypatch.setattr(
        "fulmen_algorithm.trainers.local.logprobs_of",
        lambda model, rows, **how: (seen.extend(rows), logprobs_of(model, rows, **how))[1],
    )
    world.add_resource("resources/dataset.train", json.dumps({"question": "1+1=", "hint": "12"}).encode())
    draft = with_settings(grpo_draft, algorithm="distill", teacher={"kind": "self", "hint": "hint"}, steps=1)
    await carry_out(replace(draft, inputs={**draft.inputs, "train_tasks": "resources/dataset.train/versions/2"}))
    assert seen
    assert all(row.token_ids[: len(prefix)] == tuple(prefix) and row.trained_tokens == 2 for row in seen)
    assert "12" in policy.tokenizer.decode(prefix)


@pytest.mark.parametrize(
    ("algorithm", "settings", "problem"),
    [
        ("distill", {}, "teacher"),
        ("distill", {"teacher": {"kind": "none"}}, "leaves no training signal"),
        ("grpo", {"advantage": {"kind": "none"}}, "leaves no training signal"),
        ("ppo", {"teacher": TEACHER}, "gae computes advantages from rewards"),
        ("grpo", {"teacher": TEACHER, "temperature": 0.7}, "temperature must be 1"),
        ("distill", {"teacher": TEACHER, "rewards": {"weights": {"a": 1.0}}}, "advantage none uses no rewards"),
        ("replay", {"teacher": {"kind": "self", "hint": "solution"}}, "needs the tasks of rollouts"),
        ("grpo", {"teacher": {"kind": "self"}}, "hint"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(algorithm, settings, problem):
    with pytest.raises(SettingsInvalid) as caught:
        parse_settings(ALGORITHMS[algorithm], json.dumps(settings))
    assert any(problem in f"{each.field} {each.description}" for each in caught.value.violations)


async def test_a_teacher_that_gives_no_scores_fails_the_run(world, grpo_draft, carry_out):
    def refuses(_model, _ids):
        raise RunFailed("teacher gave no log-probabilities")

    world.score = refuses
    draft = with_settings(grpo_draft, algorithm="distill", teacher=TEACHER)
    entry = await carry_out(draft, state=RunState.FAILED)
    assert entry.run.failure_message == "teacher gave no log-probabilities"


def sampled_rows(policy: PolicyModel, chance: np.random.Generator, count: int, length: int = 2) -> list[Row]:
    """Answers that are drawn from the policy, to prompts of one digit."""
    rows = []
    for index in range(count):
        prompt = [4, 6 + index % 4]
        ids, logprobs = list(prompt), []
        for _ in range(length):
            with torch.no_grad():
                logits = policy.model(torch.tensor([ids])).logits[0, -1].double()
            log_p = logits.log_softmax(-1).numpy()
            token = int(chance.choice(len(log_p), p=np.exp(log_p) / np.exp(log_p).sum()))
            ids.append(token)
            logprobs.append(float(log_p[token]))
        rows.append(
            row_from_completion(
                rollout_id=str(index),
                prompt_ids=prompt,
                completion_ids=ids[2:],
                logprobs=logprobs,
                advantage=0.0,
                version=0,
            )
        )
    return rows


async def test_a_student_becomes_like_its_teacher(model_dir):
    teacher = PolicyModel.load(model_dir)
    taught = [
        row_from_completion(
            rollout_id=str(d),
            prompt_ids=[4, 6 + d],
            completion_ids=[10 + d, 14 - d],
            logprobs=[0.0, 0.0],
            advantage=1.0,
            version=0,
        )
        for d in range(4)
    ]
    state = make_state(teacher, OptimizerSettings(learning_rate=3e-3))
    for _ in range(25):
        sft_step(state, taught, settings=StepSettings())
    student = PolicyModel.load(model_dir)
    state, chance = make_state(student, OptimizerSettings(learning_rate=3e-3)), np.random.default_rng(5)
    divergences = []
    for _ in range(40):
        rows = sampled_rows(student, chance, 16)
        opinions = logprobs_of(teacher, rows, settings=StepSettings(), trained_only=True)
        gaps = [np.array(row.old_logprobs) - np.array(opinion) for row, opinion in zip(rows, opinions, strict=True)]
        divergences.append(float(np.sum(gaps)) / sum(row.trained_tokens for row in rows))
        given = [replace(row, advantages=tuple(-gap)) for row, gap in zip(rows, gaps, strict=True)]
        train_step(state, given, settings=StepSettings())
    assert divergences[0] > 0.8
    assert np.mean(divergences[-5:]) < 0.2 * divergences[0]
