"""The memory of a training is computed from the shape of a model, and agrees with the real thing."""

from __future__ import annotations

import json
import shutil
import venv
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fulmen.train_toml.train import load_train_config
from fulmen_algorithm.training.optimizers import make_optimizer
from fulmen_algorithm.training.settings import AdamW, Muon, OptimizerSettings, Sgd, UpdateRule
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_cli.model.memory import (
    EnginePlan,
    OptimizerKind,
    TrainingPlan,
    activation_bytes_per_token,
    engine_parts,
    training_parts,
)
from fulmen_cli.model.shape import ModelShape, ShapeUnknown
from tests.support.algorithm.hub import Repository, running_hub
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.commands import run_module
from tests.support.cli.screens import check_screen

QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}
runner = CliRunner()


def made(kind: str, **changed: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SMALL, **changed})


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"head_dim": 16}),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
        ),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_parameters_are_those_that_the_library_has(kind: str, changed: dict[str, Any]) -> None:
    config = made(kind, **changed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelShape.read(config.to_dict()).parameters == model.num_parameters()


def test_the_shape_of_a_model_on_a_hub_gives_the_size_in_its_name() -> None:
    assert round(ModelShape.read(QWEN3_0_6B).parameters / 1e9, 2) == 0.60


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_those_that_peft_makes() -> None:
    from peft import LoraConfig, get_peft_model

    config = made("llama")
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelShape.read(config.to_dict()).adapter_parameters(8) == trained


@pytest.mark.parametrize(("kind", "head"), [("qwen3", 32), ("llama", 16)])
def test_what_a_layer_keeps_for_the_backward_pass_is_what_is_counted(kind: str, head: int) -> None:
    tokens = 100
    config = made(kind, head_dim=head, hidden_size=128, intermediate_size=384, num_hidden_layers=6)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    counted = [kept_bytes(model, layers, tokens) for layers in (2, 6)]
    per_token = (counted[1] - counted[0]) / 4 / tokens
    assert per_token == pytest.approx(activation_bytes_per_token(ModelShape.read(config.to_dict())), rel=0.02)


def kept_bytes(decoder: Any, layers: int, tokens: int) -> int:
    """Returns the bytes that a pass of some layers in bf16 keeps, without the weights."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_copy_of_weight = tensor.dim() == 2 and tensor.shape[0] != 1 and tokens not in tensor.shape
        if storage.data_ptr() not in weights and not is_copy_of_weight:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    whole, decoder.layers = decoder.layers, decoder.layers[:layers]
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            decoder(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    finally:
        decoder.layers = whole
    return sum(kept.values())


def sizes(plan: TrainingPlan, config: dict[str, Any] = QWEN3_0_6B) -> dict[str, int]:
    return {part.name: part.size_bytes for part in training_parts(ModelShape.read(config), plan)}


def test_weights_gradients_and_moments_are_sixteen_bytes_per_parameter_and_spread_over_gpus() -> None:
    parameters = ModelShape.read(QWEN3_0_6B).parameters
    one, four = sizes(TrainingPlan()), sizes(TrainingPlan(gpus=4))
    held = ("weights", "gradients", "optimiser")
    assert sum(one[name] for name in held) == 16 * parameters
    assert sum(four[name] for name in held) == pytest.approx(4 * parameters, abs=4)


def test_split_rows_divide_the_activations_but_for_the_mask_and_keys_and_values_of_all_positions() -> None:
    shape = ModelShape.read(QWEN3_0_6B)
    one, two = sizes(TrainingPlan()), sizes(TrainingPlan(context=2))
    # Of four chunks of 2048 a GPU has the first and the last, or the two between: keys and values of 16 heads of 128 in bf16.
    gathered = (2048 + 8192) * 2 * 16 * 128 * 2
    mask = (2048 * 2048 + 2048 * 8192) * 2
    assert two["activations"] == one["activations"] / 2 + 28 * gathered + mask
    once = sizes(TrainingPlan(context=2, checkpointing=True))["activations"]
    assert once == sizes(TrainingPlan(checkpointing=True))["activations"] / 2 + gathered + mask
    assert two["weights"] == 4 * shape.parameters


RULES = [AdamW(), AdamW(fused=True), Muon(), Muon(momentum=0), Sgd(), Sgd(momentum=0.9)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16}),
    ],
)
def test_the_optimiser_keeps_what_is_counted(kind: str, changed: dict[str, Any], rule: AdamW | Muon | Sgd) -> None:
    config = made(kind, **changed)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=1e-3, rule=rule))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # But for the numbers of steps, one of each weight.
    kept = sum(tensor.nbytes for state in optimizer.state.values() for name, tensor in state.items() if name != "step")
    plan = TrainingPlan(optimizer=rule.kind, momentum=getattr(rule, "momentum", 0))
    assert sizes(plan, config.to_dict())["optimiser"] == kept


def test_the_optimisers_that_are_counted_are_all() -> None:
    assert {type(rule) for rule in RULES} == {*get_args(get_args(UpdateRule)[0])}


def test_split_matrices_are_divided_and_the_rest_is_whole_on_each_gpu() -> None:
    shape = ModelShape.read(QWEN3_0_6B)
    embeddings_and_norms = 151_936 * 1024 + 28 * (2 * 1024 + 2 * 128) + 1024
    one, two = sizes(TrainingPlan()), sizes(TrainingPlan(gpus=2, tensor=2))
    assert two["weights"] == 4 * ((shape.parameters - embeddings_and_norms) // 2 + embeddings_and_norms)
    assert one["activations"] / 2 < two["activations"] < one["activations"]
    both = sizes(TrainingPlan(gpus=4, tensor=2))
    assert both["weights"] == pytest.approx(two["weights"] / 2, abs=4)


def test_a_critic_is_trained_with_weights_gradients_and_moments_of_its_own() -> None:
    parameters = ModelShape.read(QWEN3_0_6B).parameters
    assert sizes(TrainingPlan(critic=True))["critic"] == 16 * parameters
    assert sizes(TrainingPlan(critic=True, gpus=4))["critic"] == pytest.approx(4 * parameters, abs=16)


def test_adapters_need_no_gradients_and_moments_of_the_model() -> None:
    shape, lora = ModelShape.read(QWEN3_0_6B), sizes(TrainingPlan(lora_rank=16))
    assert lora["weights"] == 4 * shape.parameters
    assert lora["gradients"] + lora["optimiser"] == 12 * shape.adapter_parameters(16)


def test_checkpointing_keeps_one_layer_instead_of_all() -> None:
    assert sizes(TrainingPlan(checkpointing=True))["activations"] < sizes(TrainingPlan())["activations"] / 8


def test_the_cache_of_the_engine_grows_with_calls_and_is_split_by_heads_of_keys() -> None:
    shape = ModelShape.read(QWEN3_0_6B)
    one = engine_parts(shape, EnginePlan(sequences=1, length=1000))[1].size_bytes
    assert one == 2 * 28 * 8 * 128 * 2 * 1000
    assert engine_parts(shape, EnginePlan(gpus=16, sequences=4, length=1000))[1].size_bytes == one * 4 // 8


@pytest.mark.parametrize(
    ("config", "text"),
    [({}, "hidden_size, num_hidden_layers"), ({**SMALL, "hidden_size": -1}, "hidden_size is -1")],
)
def test_a_configuration_without_the_numbers_is_refused_with_their_names(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeUnknown, match=text):
        ModelShape.read(config)


def test_a_plan_prints_parts_and_cards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    done = runner.invoke(app, ["model", "plan", str(tmp_path)])
    assert done.exit_code == 0, done.output
    check_screen("model-plan", done.output)


def test_a_plan_for_programs_says_how_many_gpus_it_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_0_6B, "num_hidden_layers": 112, "hidden_size": 4096}))
    plan = json.loads(
        runner.invoke(app, ["model", "plan", str(tmp_path), "--gradient-checkpointing", "-o", "json"]).output
    )
    assert plan["total_bytes"] == sum(part["size_bytes"] for part in plan["parts"])
    needed = {card["name"]: card["gpus"] for card in plan["cards"]}
    assert needed["RTX 3090 / 4090, 24 GB"] == 0
    assert needed["H200, 141 GB"] > 1


def test_sizes_may_be_given_instead_of_a_model() -> None:
    given = ",".join(f"{name}={json.dumps(value)}" for name, value in SMALL.items())
    done = runner.invoke(app, ["model", "plan", given, "--max-model-len", "256", "-o", "json"])
    assert json.loads(done.output)["parameters"] == ModelShape.read(SMALL).parameters


NUMBERS = {name: value for name, value in QWEN3_0_6B.items() if name != "model_type"}
SIZES = ",".join(f"{name}={json.dumps(value)}" for name, value in NUMBERS.items())


@pytest.mark.parametrize("rule", get_args(get_args(UpdateRule)[0]), ids=lambda rule: rule.__name__)
def test_every_optimiser_of_the_trainer_can_be_planned(rule: type[AdamW | Muon | Sgd]) -> None:
    kind = rule().kind
    done = runner.invoke(app, ["model", "plan", SIZES, "--optimizer", kind, "-o", "json"])
    assert done.exit_code == 0, done.output
    parts = {part["name"]: part["size_bytes"] for part in json.loads(done.output)["parts"]}
    assert parts["optimiser"] == sizes(TrainingPlan(optimizer=kind), NUMBERS)["optimiser"]


def test_sgd_is_planned_with_its_momentum() -> None:
    done = runner.invoke(app, ["model", "plan", SIZES, "--optimizer", "sgd", "--momentum", "0.9", "-o", "json"])
    assert done.exit_code == 0, done.output
    parts = {part["name"]: part["size_bytes"] for part in json.loads(done.output)["parts"]}
    assert parts["optimiser"] == 4 * ModelShape.read(NUMBERS).parameters


@pytest.mark.parametrize("momentum", ["1", "-0.1", "nan"])
def test_a_momentum_that_no_training_has_is_refused_and_so_is_one_of_another_optimiser(momentum: str) -> None:
    done = runner.invoke(app, ["model", "plan", SIZES, "--momentum", momentum])
    assert done.exit_code == Exit.USAGE
    assert f"--momentum {momentum} is not from 0 to below 1." in done.output
    assert "--momentum is SGD's: --optimizer sgd." in done.output


def test_the_optimisers_that_can_be_planned_are_those_of_the_trainer() -> None:
    assert set(get_args(OptimizerKind)) == {rule().kind for rule in get_args(get_args(UpdateRule)[0])}


def test_muon_is_planned_on_one_gpu_or_not_at_all_for_it_needs_whole_matrices() -> None:
    large = SIZES.replace("hidden_size=1024", "hidden_size=8192")
    counts = {}
    for kind in ("adamw", "muon"):
        done = runner.invoke(app, ["model", "plan", large, "--optimizer", kind, "-o", "json"])
        counts[kind] = {card["gpus"] for card in json.loads(done.output)["cards"]}
    assert counts["muon"] == {0, 1}
    assert max(counts["adamw"]) > 1
    shown = runner.invoke(app, ["model", "plan", large, "--optimizer", "muon"]).output
    assert "Smaller: --gradient-checkpointing, --token-budget 4096." in shown


def test_what_muon_cannot_train_is_refused_with_every_problem() -> None:
    arguments = ["--optimizer", "muon", "--gpus", "2", "--lora-rank", "16", "--tensor-parallel", "4"]
    done = runner.invoke(app, ["model", "plan", SIZES, *arguments])
    assert done.exit_code == Exit.USAGE
    for text in ("needs as many GPUs", "--optimizer muon needs whole matrices: --gpus 1", "--lora-rank 0"):
        assert text in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["/nowhere"], Exit.NOT_FOUND, "cannot be read"),
        (["hidden_size=many"], Exit.USAGE, "is not a size"),
        (["hidden_size=8"], Exit.USAGE, "has no num_hidden_layers"),
        (["hf:not a name"], Exit.USAGE, "must be hf:organisation/name"),
    ],
)
def test_what_is_no_model_is_refused(arguments: list[str], code: Exit, text: str) -> None:
    done = runner.invoke(app, ["model", "plan", *arguments])
    assert done.exit_code == code
    assert text in done.output


async def test_a_plan_of_a_model_on_a_hub_reads_its_configuration_alone(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(QWEN3_0_6B).encode(), "model.safetensors": b"x" * 1000}
    with running_hub() as hub:
        hub.repositories["Acme/Tiny"] = Repository.of(files)
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = await run_module("fulmen_cli", "model", "plan", "hf:Acme/Tiny", "-o", "json", environment=environment)
        unknown = await run_module("fulmen_cli", "model", "plan", "hf:Acme/None", environment=environment)
    assert json.loads(done.stdout)["parameters"] == ModelShape.read(QWEN3_0_6B).parameters
    assert hub.files_asked() == ["config.json"]
    assert unknown.status == Exit.NOT_FOUND
    assert "no model Acme/None" in unknown.stderr


async def test_the_real_model_of_the_support_desk_is_checked_and_fits_on_one_gpu_of_40_gb(
    tmp_path: Path, repository_root: Path
) -> None:
    folder = tmp_path / "desk"
    shutil.copytree(repository_root / "examples/support_agent", folder)
    venv.create(folder / ".venv", symlinks=True)
    talk = [{"role": "user", "content": "Where is order D27?"}]
    answer = {"role": "assistant", "content": "It was delivered."}
    (folder / "data").mkdir()
    for name in ("desk.train", "desk.validation"):
        (folder / f"data/{name}.jsonl").write_text(f"{json.dumps({'messages': [*talk, answer]})}\n")
    (folder / "data/exam.jsonl").write_text(f"{json.dumps({'input': {'messages': talk}})}\n")
    checked = await run_module("fulmen_cli", "train", str(folder / "imitate_real.toml"), "--check", environment={})
    assert "imitate_real.toml is valid." in checked.stdout, checked.stderr

    base = load_train_config(folder / "imitate_real.toml").policy.base
    with running_hub() as hub:
        hub.repositories[base.removeprefix("hf:")] = Repository.of({"config.json": json.dumps(QWEN3_0_6B).encode()})
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        planned = await run_module("fulmen_cli", "model", "plan", base, "-o", "json", environment=environment)
    assert {card["gpus"] for card in json.loads(planned.stdout)["cards"] if card["memory_bytes"] >= 40 * 2**30} == {1}
