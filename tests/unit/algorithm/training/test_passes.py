import shutil

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training import passes, policy, scorer
from fulmen_algorithm.training.compute import ComputeSettings
from fulmen_algorithm.training.offloading import offloaded
from fulmen_algorithm.training.passes import Attention, PassSettings, pass_problems
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_step
from fulmen_exchange.ranks import Ranks

OPTIMIZER = OptimizerSettings(learning_rate=1e-3)


def step_of(model_dir, rows, asked=None, **compute):
    model = PolicyModel.load(model_dir)
    model.prepare(ComputeSettings(passes=asked or PassSettings(), **compute), Ranks())
    state = make_state(model, OPTIMIZER)
    return train_step(state, rows, settings=StepSettings(token_budget=64), current_version=2), state


def assert_same_step(one, other):
    (mine, state), (yours, others) = one, other
    assert mine.loss == pytest.approx(yours.loss, abs=1e-6)
    assert mine.grad_norm == pytest.approx(yours.grad_norm, rel=1e-5)
    weights = zip(state.policy.model.named_parameters(), others.policy.model.parameters(), strict=True)
    for (name, value), expected in weights:
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("attention", [Attention.EAGER, Attention.SDPA])
def test_every_attention_of_a_cpu_gives_the_same_step_on_packed_rows(model_dir, rows, attention):
    asked = step_of(model_dir, rows, PassSettings(attention=attention))
    assert asked[1].policy.attention == attention
    assert_same_step(asked, step_of(model_dir, rows))


def test_without_a_choice_attention_is_sdpa(model_dir):
    assert PolicyModel.load(model_dir).attention == "sdpa"


def test_a_run_whose_model_lacks_an_attention_ends_and_says_so(model_dir):
    compute = ComputeSettings(passes=PassSettings(attention=Attention.FLASH))
    setup = TrainerSetup(model_dir=model_dir, optimizer=OPTIMIZER, seed=0, compute=compute)
    with pytest.raises(RunFailed, match="cannot be computed with attention flash_attention_2"):
        LocalTrainer.open(setup, Ranks())


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of torch about its own inside
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_the_same_step_and_keep_their_names(model_dir, rows, monkeypatch, checkpointing):
    # The compiler of kernels is torch's; what is tested is that layers are captured, whole and for every length.
    graphs = []
    compiled = torch.nn.Module.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: compiled(self, backend=count, **more))
    asked = step_of(model_dir, rows, PassSettings(compile=True), gradient_checkpointing=checkpointing)
    assert graphs
    assert_same_step(asked, step_of(model_dir, rows))
    names = [name for name, _ in asked[1].policy.model.named_parameters()]
    assert names == [name for name, _ in PolicyModel.load(model_dir).model.named_parameters()]


def test_offloaded_activations_give_the_same_step(model_dir, rows, monkeypatch):
    moved = []

    def is_large(tensor):
        moved.append(tensor.nbytes)
        return tensor.nbytes >= 512

    monkeypatch.setattr(policy, "offloaded", lambda: offloaded(is_large))
    asked = step_of(model_dir, rows, PassSettings(offload=True))
    assert any(size >= 512 for size in moved)
    assert_same_step(asked, step_of(model_dir, rows))


def test_weights_are_not_offloaded():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    kept = []
    with offloaded(lambda tensor: not kept.append(tensor)):
        loss = (torch.ones(2, 64) @ weight).square().sum()
    loss.backward()
    assert torch.equal(weight.grad, torch.full((64, 64), 2 * 2 * 64.0))


def test_logits_of_a_long_batch_are_not_kept_for_the_backward_pass(model_dir, rows, monkeypatch):
    def largest_saved(pieces):
        monkeypatch.setattr(scorer, "LOGITS_AT_ONCE", pieces)
        model = PolicyModel.load(model_dir)
        vocabulary, saved = model.model.config.vocab_size, []

        def pack(tensor):
            if tensor.shape[-1:] == (vocabulary,):
                saved.append(tensor.numel())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            train_step(make_state(model, OPTIMIZER), rows, settings=StepSettings(token_budget=64))
        return max(saved, default=0)

    assert largest_saved(2**25) > 80
    # Recomputed piece by piece in the backward pass, of 3 positions of a vocabulary of 26.
    assert largest_saved(80) <= 80


@pytest.mark.parametrize(
    ("asked", "device", "text"),
    [
        ({"attention": "flash_attention_2"}, "cpu", "needs a GPU"),
        ({"attention": "flex_attention"}, "cpu", "needs a GPU"),
        ({"attention": "flash_attention_2"}, "cuda", "needs the package flash-attn"),
        ({"offload": True}, "cpu", "there is no other memory"),
        ({"compile": True}, "cpu", "install g"),
    ],
)
def test_what_a_machine_cannot_compute_is_refused_with_the_remedy(monkeypatch, asked, device, text):
    monkeypatch.setattr(passes, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (problem,) = pass_problems(PassSettings.model_validate(asked), device)
    assert text in problem


def test_what_every_machine_can_compute_is_not_refused():
    assert not pass_problems(PassSettings(), "cpu")
    assert not pass_problems(PassSettings(attention=Attention.SDPA), "cpu")
    assert not pass_problems(PassSettings(attention=Attention.FLEX, offload=True), "cuda")


def test_an_unknown_attention_is_refused_with_the_list():
    with pytest.raises(ValueError, match="'auto', 'eager', 'sdpa', 'flash_attention_2' or 'flex_attention'"):
        PassSettings.model_validate({"attention": "xformers"})
