"""The critic: its advantages are those of the paper, it learns, and it resumes bit for bit; PPO and its like learn."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, CodeGenConfig, CodeGenForCausalLM

from fulmen_algorithm.losses.advantage_settings import (
    AdvantageSettings,
    CriticPlan,
    CriticSettings,
    GaeAdvantage,
    ReinforcePpAdvantage,
    RlooAdvantage,
    ScoringSettings,
)
from fulmen_algorithm.losses.advantages import Sample, token_advantages
from fulmen_algorithm.losses.objectives import LossKl, Objective
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.devices import Devices
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.critic import Critic, generalised_advantages, value_loss
from fulmen_algorithm.training.optimizer import MIN_NORMS
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import NO_VERSION, Row, row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, PackingMode, StepSettings
from fulmen_algorithm.training.state import TrainingState, make_state
from fulmen_algorithm.training.state_files import CRITIC, CRITIC_PARTS, read_state, write_state
from fulmen_algorithm.training.step import train_batch
from fulmen_exchange.ranks import Ranks
from tests.support.algorithm import reference_advantages as paper

BUDGET = {"token_budget": 256, "mode": PackingMode.PADDED}
PLAN = CriticPlan(critic=CriticSettings(learning_rate=1e-2))
numbers = st.floats(-3, 3, allow_nan=False)


def critic_of(folder: Path, plan: CriticPlan = PLAN, *, spread: float = 0.0) -> Critic:
    """Loads a critic; a spread gives its head other weights than 0."""
    critic = Critic.load(folder, plan, ranks=Ranks(), pad_token_id=0)
    if spread:
        torch.manual_seed(3)
        torch.nn.init.normal_(critic.model.score.weight, std=spread)
    return critic


def rewarded(row: Row, reward: float) -> Row:
    return replace(row, rewards=(0.0,) * (len(row.token_ids) - 1) + (reward,))


@settings(max_examples=30)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.floats(0.5, 1), st.floats(0, 1))
def test_advantages_equal_the_formula_of_the_paper(pairs, gamma, lam):
    rewards, values = np.array(pairs).T
    found = generalised_advantages(rewards, values, gamma=gamma, lam=lam)
    np.testing.assert_allclose(found, paper.gae(rewards, values, gamma=gamma, lam=lam), rtol=1e-9, atol=1e-9)


def test_a_new_critic_expects_nothing_so_that_advantages_are_returns(tiny_model, rows):
    plan = CriticPlan(advantage=GaeAdvantage(whiten=False))
    critic_targets = critic_of(tiny_model, plan).assess([rewarded(r, 2.0) for r in rows[:3]], **BUDGET)
    for row in critic_targets.rows:
        assert [a for a, trains in zip(row.advantages, row.loss_mask, strict=True) if trains] == pytest.approx(
            [2.0] * row.trained_tokens
        )


def test_into_how_many_rows_a_rollout_was_cut_changes_no_advantage(tiny_model):
    plan = CriticPlan(advantage=GaeAdvantage(gamma=0.9, lam=0.7, whiten=False))
    critic = critic_of(tiny_model, plan, spread=0.5)
    whole = Row(
        rollout_id="a",
        token_ids=(4, 7, 8, 9, 10, 11, 12),
        loss_mask=(False, False, True, True, False, True, True),
        old_logprobs=(0.0, 0.0, -1.0, -1.0, 0.0, -1.0, -1.0),
        advantages=(0.0,) * 7,
        policy_versions=(NO_VERSION, NO_VERSION, 0, 0, NO_VERSION, 0, 0),
        rewards=(0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 1.0),
        steps=(0, 0, 0, 0, 0, 1, 1),
    )
    first = replace(
        whole,
        **{name: getattr(whole, name)[:4] for name in (
            "token_ids", "loss_mask", "old_logprobs", "advantages", "policy_versions", "rewards", "steps"
        )},
    )  # fmt: skip
    nothing = (False,) * 4
    second = replace(
        whole,
        loss_mask=nothing + whole.loss_mask[4:],
        old_logprobs=(0.0,) * 5 + (-1.0, -1.0),
        policy_versions=(NO_VERSION,) * 5 + (0, 0),
        rewards=(0.0,) * 6 + (1.0,),
    )
    [together] = critic.assess([whole], **BUDGET).rows
    # The order of the rows does not matter: the steps say which came first.
    later, earlier = critic.assess([second, first], **BUDGET).rows
    assert earlier.advantages[2:4] == pytest.approx(together.advantages[2:4], abs=1e-5)
    assert later.advantages[5:] == pytest.approx(together.advantages[5:], abs=1e-5)
    assert any(together.advantages)


def test_a_value_that_left_its_old_one_is_clipped_where_that_makes_the_loss_larger():
    old, targets = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.1])
    values = torch.tensor([0.9, -0.5, 0.15], requires_grad=True)
    loss = value_loss(values, old, targets, clip=0.2)
    assert loss.tolist() == pytest.approx([0.8**2 / 2, 1.5**2 / 2, 0.05**2 / 2])
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, 0.05])
    assert value_loss(values, old, targets, clip=None)[0].item() == pytest.approx(0.1**2 / 2)


def test_the_critic_learns_what_rollouts_earn(tiny_model, rows):
    critic = critic_of(tiny_model, CriticPlan(critic=CriticSettings(learning_rate=1e-2, clip=None)))
    told = [rewarded(row, float(index % 2)) for index, row in enumerate(rows)]
    losses = []
    for _ in range(40):
        critic_targets = critic.assess(told, **BUDGET)
        losses.append(critic.learn(critic_targets, range(len(told)), **BUDGET))
    assert losses[-1]["value_loss"] < 0.3 * losses[0]["value_loss"]
    assert losses[-1]["value_explained"] > 0.5


def test_a_critic_step_that_is_not_finite_changes_nothing(tiny_model, rows):
    critic = critic_of(tiny_model, spread=0.1)
    critic_targets = critic.assess([rewarded(row, 1.0) for row in rows], **BUDGET)
    before = {name: value.clone() for name, value in critic.model.state_dict().items()}
    spoiled = replace(critic_targets, targets=tuple(tuple(float("inf") for _ in own) for own in critic_targets.targets))
    assert critic.learn(spoiled, range(len(rows)), **BUDGET)["value_skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in critic.model.state_dict().items())
    assert critic.learn(critic_targets, range(len(rows)), **BUDGET)["value_skipped"] == 0.0


def test_a_critic_step_whose_gradient_explodes_changes_nothing_but_the_norms(tiny_model, rows):
    critic, fresh = critic_of(tiny_model, spread=0.1), critic_of(tiny_model)
    usual = critic.assess([rewarded(row, 1.0) for row in rows], **BUDGET)
    for _ in range(MIN_NORMS):
        critic.learn(usual, range(len(rows)), **BUDGET, explosion_factor=1e6)
    before = {name: value.clone() for name, value in critic.model.state_dict().items()}
    far = replace(usual, targets=tuple(tuple(1e6 for _ in own) for own in usual.targets))
    metrics = critic.learn(far, range(len(rows)), **BUDGET, explosion_factor=50.0)
    assert (metrics["value_exploded"], metrics["value_skipped"]) == (1.0, 1.0)
    assert all(torch.equal(before[name], value) for name, value in critic.model.state_dict().items())
    fresh.model.load_state_dict(critic.model.state_dict())
    fresh.norms = critic.norms
    assert fresh.learn(far, range(len(rows)), **BUDGET, explosion_factor=50.0)["value_exploded"] == 1.0
    assert fresh.learn(far, range(len(rows)), **BUDGET)["value_skipped"] == 0.0


def state_of(folder: Path, advantage: AdvantageSettings, rate: float = 1e-2) -> TrainingState:
    torch.manual_seed(0)
    state = make_state(PolicyModel.load(folder), OptimizerSettings(learning_rate=rate))
    if isinstance(advantage, GaeAdvantage):
        state.critic = critic_of(folder, CriticPlan(critic=CriticSettings(learning_rate=1e-2), advantage=advantage))
    return state


def test_training_with_a_critic_resumes_bit_for_bit(tiny_model, rows, tmp_path):
    told = [rewarded(row, float(index % 2)) for index, row in enumerate(rows)]

    def step(state: TrainingState, seed: int) -> None:
        train_batch(state, told, settings=StepSettings(), batch=BatchSettings(minibatches=2), seed=seed)

    unbroken = state_of(tiny_model, GaeAdvantage())
    step(unbroken, 1)
    write_state(unbroken, tmp_path)
    step(unbroken, 2)
    resumed = state_of(tiny_model, GaeAdvantage())
    read_state(tmp_path, resumed)
    step(resumed, 2)
    for one, other in ((unbroken.policy, resumed.policy), (unbroken.critic, resumed.critic)):
        weights, others = one.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_critic_that_an_earlier_release_kept_in_one_file_resumes_bit_for_bit(tiny_model, rows, tmp_path):
    told = [rewarded(row, float(index % 2)) for index, row in enumerate(rows)]
    state = state_of(tiny_model, GaeAdvantage())
    train_batch(state, told, settings=StepSettings(), batch=BatchSettings(minibatches=2), seed=1)
    write_state(state, tmp_path)
    critic = state.critic
    shutil.rmtree(tmp_path / CRITIC_PARTS)
    model, optimizer = critic.model.state_dict(), critic.optimizer.state_dict()
    torch.save({"model": model, "optimizer": optimizer, "norms": critic.norms}, tmp_path / CRITIC)
    resumed = state_of(tiny_model, GaeAdvantage())
    read_state(tmp_path, resumed)
    for each in (state, resumed):
        train_batch(each, told, settings=StepSettings(), batch=BatchSettings(minibatches=2), seed=2)
    others = resumed.critic.model.state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in critic.model.state_dict().items())


TARGET, LENGTH, PROMPTS, GROUP = 9, 3, 6, 4


@torch.no_grad()
def sampled(policy: PolicyModel, generator: torch.Generator) -> list[tuple[str, list[int], list[int], list[float]]]:
    """Samples short answers: (group, prompt, answer, log-probabilities)."""
    prompts = [[4, 6 + p] for p in range(PROMPTS) for _ in range(GROUP)]
    ids, logprobs = torch.tensor(prompts), []
    for _ in range(LENGTH):
        log = policy.model(ids).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(log.exp(), 1, generator=generator)
        logprobs.append(log.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return [
        (str(index // GROUP), prompt, answer, log)
        for index, (prompt, answer, log) in enumerate(
            zip(prompts, ids[:, 2:].tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
        )
    ]


@pytest.mark.parametrize(
    "advantage", [RlooAdvantage(), ReinforcePpAdvantage(), GaeAdvantage(lam=0.95)], ids=lambda a: a.kind
)
def test_a_policy_learns_to_say_what_is_rewarded(tiny_model, advantage):
    state, generator = state_of(tiny_model, advantage), torch.Generator().manual_seed(5)
    scoring, means = ScoringSettings(advantage=advantage), []
    for step in range(25):
        answers = sampled(state.policy, generator)
        rewards = [answer.count(TARGET) / LENGTH for _, _, answer, _ in answers]
        means.append(sum(rewards) / len(rewards))
        samples = [
            Sample(key=str(i), group=group, rewards={"reward": rewards[i]}, tokens=LENGTH)
            for i, (group, _, _, _) in enumerate(answers)
        ]
        rows = []
        numbers = token_advantages(samples, scoring)
        for index, (_, prompt, answer, logprobs) in enumerate(answers):
            row = row_from_completion(
                rollout_id=str(index), prompt_ids=prompt, completion_ids=answer, logprobs=logprobs,
                advantage=0.0, version=step,
            )  # fmt: skip
            values = (0.0, 0.0, *numbers[index].tolist())
            name = "rewards" if isinstance(advantage, GaeAdvantage) else "advantages"
            rows.append(replace(row, **{name: values}))
        train_batch(state, rows, settings=StepSettings(), batch=BatchSettings(minibatches=1), seed=step)
    assert sum(means[:3]) / 3 < 0.2, means
    assert sum(means[-3:]) / 3 > 0.6, means


def test_a_critic_and_a_reference_on_devices_of_their_own_change_no_number(tiny_model, rows):
    setup = TrainerSetup(
        model_dir=tiny_model,
        reference_dir=tiny_model,
        optimizer=OptimizerSettings(learning_rate=1e-3),
        seed=0,
        critic=PLAN,
    )
    step = StepSettings(objective=Objective(kl=LossKl(coefficient=0.1)))
    told = [rewarded(row, float(index % 2)) for index, row in enumerate(rows)]
    found = []
    # A machine without GPUs has one device, under two names.
    for devices in (None, Devices(policy="cpu", reference="cpu:0", critic="cpu:0")):
        trainer = LocalTrainer.open(setup, Ranks(), devices)
        first = trainer.train(told, settings=step, batch=BatchSettings(minibatches=2), seed=1, current_version=0)
        later = trainer.train(told, settings=step, batch=BatchSettings(minibatches=2), seed=2, current_version=1)
        reference = trainer.reference_logprobs(told, settings=step)
        found.append(([(each.loss, each.grad_norm, each.metrics) for each in (*first, *later)], reference))
    assert found[0] == found[1]
    assert all(metrics["value_skipped"] == 0.0 for _, _, metrics in found[0][0])


def test_an_architecture_without_a_critic_is_refused_in_our_own_words(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = CodeGenConfig(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=4, n_positions=64, rotary_dim=4)
    CodeGenForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    setup = TrainerSetup(model_dir=tmp_path, optimizer=OptimizerSettings(learning_rate=1e-3), seed=0, critic=PLAN)
    # The library's text is a list of every architecture that it knows.
    with pytest.raises(
        RunFailed, match=r"cannot be used as a critic: transformers has no token classifier for its architecture\.$"
    ):
        LocalTrainer.open(setup, Ranks())
