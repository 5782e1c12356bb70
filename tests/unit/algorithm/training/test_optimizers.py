import pytest
import torch

from fulmen_algorithm.algorithms.grpo import GrpoSettings
from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.training.optimizers import make_optimizer
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import AdamW, BatchSettings, Muon, OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.state_files import read_state, write_state
from fulmen_algorithm.training.step import train_batch

BATCH = BatchSettings(minibatches=2)


def fresh(model_dir, rule, *, weight_decay=0.0, learning_rate=1e-3):
    settings = OptimizerSettings(learning_rate=learning_rate, weight_decay=weight_decay, rule=rule)
    return make_state(PolicyModel.load(model_dir), settings)


def train(state, rows, steps):
    for step in steps:
        train_batch(state, rows, settings=StepSettings(), batch=BATCH, seed=step, current_version=step)


def weights(state):
    return dict(state.policy.model.named_parameters())


def test_the_fused_step_is_the_plain_one_up_to_rounding(model_dir, rows):
    plain, fused = [fresh(model_dir, AdamW(fused=fused), weight_decay=0.1) for fused in (False, True)]
    train(plain, rows, range(3))
    train(fused, rows, range(3))
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(fused)[name], value, rtol=1e-4, atol=1e-5, msg=name)


def orthogonal(matrix, iterations):
    """Newton-Schulz iteration, by the coefficients of github.com/KellerJordan/Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def test_the_first_step_of_muon_is_its_paper_s(model_dir, rows):
    state = fresh(model_dir, Muon(momentum=0.9))
    before = {name: value.detach().clone() for name, value in weights(state).items()}
    gradients = {}
    hooks = [
        value.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
        for name, value in weights(state).items()
    ]
    train_batch(state, rows, settings=StepSettings(max_grad_norm=1e9), batch=BatchSettings(), seed=0, current_version=0)
    for hook in hooks:
        hook.remove()
    name = next(name for name in before if name.endswith("down_proj.weight"))
    matrix = gradients[name]
    # Nesterov's momentum of the first gradient is a multiple of it, which has the same directions.
    expected = orthogonal(matrix, 5) * 0.2 * max(matrix.shape) ** 0.5
    step = (before[name] - weights(state)[name].detach()) / 1e-3
    # The iteration is in bfloat16, which small singular values feel.
    assert torch.nn.functional.cosine_similarity(step.flatten(), expected.flatten(), dim=0) > 0.97
    assert float(step.norm()) == pytest.approx(float(expected.norm()), rel=0.05)


def test_muon_trains_hidden_matrices_and_adamw_the_rest(model_dir, rows):
    state = fresh(model_dir, Muon(), weight_decay=0.1)
    train(state, rows, range(1))
    kinds = {name: set(state.optimizer.state[value]) for name, value in weights(state).items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == {"momentum_buffer"}
    assert "exp_avg" in kinds["model.embed_tokens.weight"]
    assert "exp_avg" in kinds["model.norm.weight"]
    assert all(kinds.values())


@pytest.mark.parametrize("rule", [AdamW(fused=True), Muon()], ids=lambda rule: rule.kind)
def test_training_resumes_bit_for_bit_with_every_rule(model_dir, rows, tmp_path, rule):
    whole, first, second = [fresh(model_dir, rule) for _ in range(3)]
    train(whole, rows, range(4))
    train(first, rows, range(2))
    write_state(first, tmp_path)
    read_state(tmp_path, second)
    train(second, rows, range(2, 4))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_every_weight_has_one_optimiser(model_dir):
    model = PolicyModel.load(model_dir).model
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=1e-3, rule=Muon()))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_an_unknown_optimiser_is_refused_with_the_list():
    with pytest.raises(ValueError, match="'adamw', 'muon', 'sgd'"):
        GrpoSettings.model_validate({"optimizer": {"kind": "lion"}})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"parallel": {"kind": "fsdp2"}}, "needs whole matrices"),
        ({"lora": {"rank": 2}}, "needs all weights to be trained"),
    ],
)
def test_muon_is_refused_where_it_has_no_whole_matrices(settings, text):
    with pytest.raises(ValueError, match=text):
        SftSettings.model_validate({"optimizer": {"kind": "muon"}, **settings})
