"""Adapters train and nothing else does, each on the rows of its role; files are those of peft."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, UnknownRole
from fulmen_algorithm.training.settings import LoraSettings, OptimizerSettings, StepSettings, WeightsKind
from fulmen_algorithm.training.state import TrainingState, make_state
from fulmen_algorithm.training.state_files import read_state, write_state
from fulmen_algorithm.training.step import sft_step
from fulmen_algorithm.weights.publishing import WeightsOrder
from fulmen_algorithm.weights.torch_tensors import published_tensors
from fulmen_exchange.ranks import Ranks

ROLES = ("planner", "solver")
IDS = torch.tensor([[4, 7, 9, 8, 11, 6]])


def row(role: str = "", shift: int = 0) -> Row:
    ids = tuple(4 + (7 * n + shift) % 12 for n in range(6))
    mask = (False, False, True, True, True, True)
    return Row(
        rollout_id=f"{role}/{shift}",
        token_ids=ids,
        loss_mask=mask,
        old_logprobs=(0.0,) * 6,
        advantages=tuple(float(m) for m in mask),
        policy_versions=(0,) * 6,
        role=role,
    )


def state(model: Path, roles: Sequence[str] = (), dropout: float = 0.0) -> TrainingState:
    torch.manual_seed(0)
    lora = LoraSettings(rank=4, alpha=8.0, roles=tuple(roles), dropout=dropout)
    return make_state(PolicyModel.load(model, lora=lora), OptimizerSettings(learning_rate=1e-2))


def weights_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.model.named_parameters()}


def changed(before: dict[str, torch.Tensor], policy: PolicyModel) -> set[str]:
    return {name for name, tensor in weights_of(policy).items() if not torch.equal(tensor, before[name])}


def test_a_step_changes_the_adapters_of_the_roles_of_its_rows_and_nothing_else(model_dir):
    made = state(model_dir, ROLES)
    assert made.policy.adapters is not None
    before = weights_of(made.policy)
    sft_step(made, [row("solver"), row("solver", 1)], settings=StepSettings())
    moved = changed(before, made.policy)
    assert moved
    assert all(".solver." in name for name in moved)
    before = weights_of(made.policy)
    sft_step(made, [row("solver"), row("planner", 1)], settings=StepSettings())
    roles = {name.split(".")[-2] for name in changed(before, made.policy)}
    assert roles == set(ROLES)


def test_a_row_of_a_role_without_adapter_is_refused(model_dir):
    made = state(model_dir, ROLES)
    with pytest.raises(UnknownRole, match="'critic'"):
        sft_step(made, [row("critic")], settings=StepSettings())


def test_a_role_has_one_adapter():
    with pytest.raises(ValidationError, match="twice"):
        LoraSettings.model_validate_json('{"roles": ["solver", "solver"]}')


@pytest.mark.parametrize("target", ["no_such_layer", "input_layernorm"])
def test_targets_that_take_no_adapter_are_refused_with_those_that_do(model_dir, target):
    lora = LoraSettings(targets=(target,))
    setup = TrainerSetup(model_dir=model_dir, optimizer=OptimizerSettings(learning_rate=1e-3), seed=0, lora=lora)
    with pytest.raises(RunFailed, match=rf"^lora\.targets \({target}\): adapters are for .*, o_proj, q_proj"):
        LocalTrainer.open(setup, Ranks())


def test_each_row_is_scored_under_the_adapter_of_its_role(model_dir):
    made = state(model_dir, ROLES)
    for _ in range(3):
        sft_step(made, [row("solver"), row("solver", 2)], settings=StepSettings())
    rows = [row("planner"), row("solver"), row("planner", 1)]
    together = logprobs_of(made.policy, rows, settings=StepSettings())
    plain = PolicyModel.load(model_dir)
    untrained = logprobs_of(plain, rows, settings=StepSettings())
    assert together[0] == pytest.approx(untrained[0], abs=1e-5)
    assert together[2] == pytest.approx(untrained[2], abs=1e-5)
    assert together[1] != pytest.approx(untrained[1], abs=1e-2)


def test_the_files_are_those_of_peft_and_the_merged_model_is_the_same(model_dir, tmp_path):
    made = state(model_dir)
    for _ in range(3):
        sft_step(made, [row(), row(shift=1)], settings=StepSettings())
    written = made.policy.publish(tmp_path / "adapters", WeightsOrder())
    assert written is not None
    assert (written.kind, written.adapters) == (WeightsKind.LORA, ("default",))
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft asks transformers by a name that is about to change.
        warnings.simplefilter("ignore", FutureWarning)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapters" / "default")).eval()
    merged = made.policy.publish(tmp_path / "merged", WeightsOrder(merged=True))
    assert merged is not None
    assert merged.kind is WeightsKind.FULL
    whole = PolicyModel.load(tmp_path / "merged")
    with torch.no_grad():
        expected = made.policy.model(IDS).logits
        assert torch.allclose(loaded(IDS).logits, expected, atol=1e-5)
        assert torch.allclose(whole.model(IDS).logits, expected, atol=1e-5)
    assert set(published_tensors(whole.model)) == set(published_tensors(PolicyModel.load(model_dir).model))


def test_training_resumes_bit_for_bit_from_adapters_and_their_moments(model_dir, tmp_path):
    straight = state(model_dir, ROLES, dropout=0.2)
    # Only one role has moments when the state is written.
    sft_step(straight, [row("solver")], settings=StepSettings())
    write_state(straight, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 200_000
    resumed = state(model_dir, ROLES, dropout=0.2)
    for made in (straight, resumed):
        read_state(tmp_path, made)
        for shift in range(2):
            sft_step(made, [row("solver", shift), row("planner", shift)], settings=StepSettings())
    after = weights_of(straight.policy)
    assert not changed(after, resumed.policy)


def test_dropout_is_for_passes_with_a_gradient_alone(model_dir):
    made = state(model_dir, dropout=0.5)
    sft_step(made, [row()], settings=StepSettings())
    with torch.no_grad():
        scores = [logprobs_of(made.policy, [row()], settings=StepSettings()) for _ in range(2)]
    assert scores[0] == scores[1]
    losses = {sft_step(made, [row()], settings=StepSettings()).loss for _ in range(3)}
    assert len(losses) == 3


def trainer_of(model: Path, seed: int) -> LocalTrainer:
    lora = LoraSettings(rank=4, alpha=8.0, dropout=0.3)
    setup = TrainerSetup(model_dir=model, optimizer=OptimizerSettings(learning_rate=1e-2), seed=seed, lora=lora)
    return LocalTrainer.open(setup, Ranks())


def test_what_a_trainer_draws_does_not_depend_on_others_of_the_process(model_dir):
    def losses(trainer: LocalTrainer, beside: LocalTrainer | None = None) -> list[float]:
        found = []
        for shift in range(3):
            found.append(trainer.train_supervised([row(), row(shift=shift)], settings=StepSettings()).loss)
            if beside is not None:
                beside.train_supervised([row()], settings=StepSettings())
        return found

    alone = losses(trainer_of(model_dir, seed=1))
    process_wide = torch.get_rng_state()
    first, second = trainer_of(model_dir, seed=1), trainer_of(model_dir, seed=2)
    assert losses(first, beside=second) == alone
    assert torch.equal(torch.get_rng_state(), process_wide)
