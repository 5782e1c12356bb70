"""A run that cannot work is refused before it exists, with all of its problems."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulmen.errors import ResourceNotFound, SettingsInvalid
from fulmen.train_toml.train import load_train_config
from fulmen_algorithm.algorithms.sampling import RESHAPING
from fulmen_algorithm.losses.advantage_settings import OverlongSettings
from fulmen_algorithm.losses.objectives import SequenceMeanTokenSumNorm
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft, parse_settings
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec
from tests.support.algorithm.model_services import ModelResources, World
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import ALGORITHMS, created

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


async def problems(draft: RunDraft, world: World) -> dict[str, str]:
    with pytest.raises(SettingsInvalid) as raised:
        await created(draft, world)
    return {v.field: v.description for v in raised.value.violations}


async def test_every_problem_is_reported_at_once(world, grpo_draft):
    bad_tasks = world.add_resource("resources/dataset.bad", b'{"a": 1}\n{oops\n\n[1, 2\n')
    draft = replace(
        grpo_draft,
        name="projects/default/trainingRuns/Not OK",
        settings_json=json.dumps({"steps": 0, "group_size": "8", "stesp": 3}),
        policy=PolicySpec(name="No!", origin=PolicyOrigin.BUILD, source="make_model"),
        inputs={"train_tasks": bad_tasks, "tasks": "resources/x", "validation_tasks": "latest"},
    )
    found = await problems(draft, world)
    assert set(found) == {
        "name",
        "settings.steps",
        "settings.group_size",
        "settings.stesp",
        "policy.name",
        "policy.build",
        "inputs.bundle",
        "inputs.agent",
        "inputs.tasks",
        "inputs.validation_tasks",
        "inputs.train_tasks:2",
        "inputs.train_tasks:4",
    }
    assert found["settings.stesp"] == "no such setting; did you mean 'steps'?"


async def test_an_unknown_algorithm_names_the_known_ones(world, grpo_draft):
    found = await problems(replace(grpo_draft, algorithm="grop"), world)
    known = ", ".join(sorted(ALGORITHMS))
    assert found == {"algorithm": f"'grop' is not one of: {known}; did you mean 'grpo'?"}


async def test_settings_that_are_no_object_are_one_problem(world, grpo_draft):
    assert set(await problems(replace(grpo_draft, settings_json="{"), world)) == {"settings"}


async def test_demonstrations_are_checked_line_by_line(world, sft_draft):
    lines = [{"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "robot"}]}, {"text": "x"}]
    name = world.add_resource("resources/dataset.odd", b"\n".join(json.dumps(line).encode() for line in lines))
    found = await problems(replace(sft_draft, inputs={"demonstrations": name}), world)
    assert list(found) == [f"inputs.demonstrations:{n}" for n in (1, 2, 3)]


async def test_an_unknown_input_is_not_found(world, grpo_draft):
    inputs = {**grpo_draft.inputs, "agent": "resources/agent.solver/versions/7"}
    with pytest.raises(ResourceNotFound):
        await created(replace(grpo_draft, inputs=inputs), world)


async def test_the_newest_version_must_exist(world, grpo_draft):
    found = await problems(replace(grpo_draft, policy=PolicySpec(name="tiny")), world)
    assert list(found) == ["policy"]


async def test_defaults_are_filled_in(world, sft_draft):
    run = await created(replace(sft_draft, name="", settings_json=""), world)
    settings = json.loads(run.settings_json)
    assert settings["steps"] == run.step_count == 200
    assert settings["batch_size"] == 64
    assert run.name.startswith("projects/default/trainingRuns/")


@pytest.mark.parametrize(
    ("algorithm", "settings", "problem"),
    [
        ("ppo", {"advantage": {"kind": "group"}}, "compares the rollouts of a group"),
        (
            "reinforce_pp",
            {"advantage": {"kind": "reinforce_pp", "baseline": "group"}},
            "compares the rollouts of a group",
        ),
        ("grpo", {"critic": {"learning_rate": 0.1}}, "only advantage gae uses a critic"),
        ("grpo", {"lora": {"roles": ["a"]}, "roles": {"train": ["a", "b"]}}, "no adapter for b"),
        ("dapo", {"overlong": {"max_tokens": 5, "buffer_tokens": 6}}, "buffer_tokens is larger than max_tokens"),
        ("grpo", {"steps": 2, "minibatches": 4, "warmup_steps": 9}, "9 is more than the 8 optimiser steps of the run"),
        ("sft", {"steps": 10, "epochs": 2.0}, "give either steps or epochs, not both"),
        ("sft", {"steps": 0}, "must be 1 or more unless epochs is given"),
        ("sft", {"steps": 10, "warmup_steps": 11}, "11 is more than the 10 optimiser steps"),
        ("grpo", {"max_grad_norm": float("inf")}, "should be a finite number"),
        ("grpo", {"optimizer": {"kind": "sgd"}, "weight_decay": 0.1}, "needs optimizer.kind adamw"),
        (
            "sft",
            {"parallel": {"kind": "fsdp2", "ranks": 2}, "lora": {"roles": ["solver", "critic"]}},
            "several adapters need parallel.kind none or ddp",
        ),
        ("grpo", {"parallel": {"kind": "fsdp2", "ranks": 4, "shard": 3}}, "4 must be a multiple of shard, 3"),
        ("grpo", {"parallel": {"kind": "fsdp2", "ranks": 2, "shard": 4}}, "2 must be a multiple of shard, 4"),
        ("grpo", {"parallel": {"kind": "ddp", "ranks": 2, "min_ranks": 3}}, "min_ranks: 3 is more than ranks, 2"),
        (
            "grpo",
            {"parallel": {"kind": "fsdp2", "ranks": 4, "shard": 2, "min_ranks": 3}},
            "min_ranks: 3 must be a multiple of shard, 2",
        ),
        ("grpo", {"exchange": {"codec": "bf16"}}, "fsdp2 with shard: one rank has nothing to exchange"),
        ("grpo", {"exchange": {"codec": "bf16"}, "parallel": {"kind": "fsdp2"}}, "inside the backward pass"),
        (
            "grpo",
            {
                "exchange": {"codec": "bf16", "link": {"kind": "grpc", "targets": ["site:1"]}},
                "parallel": {"kind": "fsdp2", "ranks": 4, "shard": 2},
            },
            "must be kind torch with fsdp2",
        ),
        ("grpo", {"exchange": {"codec": "topk"}, "parallel": {"kind": "ddp"}}, "topk needs kind sgd"),
        (
            "sft",
            {
                "exchange": {"codec": "dgc"},
                "parallel": {"kind": "ddp"},
                "optimizer": {"kind": "sgd", "momentum": 0.9},
            },
            "must be 0, dgc has the momentum",
        ),
        (
            "grpo",
            {"exchange": {"codec": "powersgd"}, "parallel": {"kind": "ddp"}, "lora": {}},
            "powersgd keeps a residual of each step, which does not work with lora",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_message(algorithm, settings, problem):
    with pytest.raises(SettingsInvalid) as raised:
        parse_settings(ALGORITHMS[algorithm], json.dumps(settings))
    (violation,) = raised.value.violations
    assert problem in violation.description
    assert not violation.description.startswith("Value error")


def test_all_problems_of_an_exchange_are_reported_at_once():
    with pytest.raises(SettingsInvalid) as raised:
        parse_settings(ALGORITHMS["grpo"], json.dumps({"exchange": {"codec": "dgc"}, "lora": {}}))
    (violation,) = raised.value.violations
    assert all(what in violation.description for what in ("parallel.kind ddp", "lora", "dgc needs kind sgd"))


def test_copies_in_parts_exchange_their_gradients_through_any_codec():
    given = {
        "exchange": {"codec": "dgc", "ratio": 100},
        "parallel": {"kind": "fsdp2", "ranks": 8, "shard": 4},
        "optimizer": {"kind": "sgd"},
    }
    settings = parse_settings(ALGORITHMS["grpo"], json.dumps(given))
    assert (settings.parallel.copies, settings.parallel.ranks_per_copy) == (2, 4)


REQUIRED = {"distill": {"teacher": {"kind": "model", "model": "large"}}}
"""Settings that an algorithm cannot do without."""


@pytest.mark.parametrize("algorithm", [name for name, entry in ALGORITHMS.items() if entry.trains])
def test_one_setting_compresses_the_gradients_of_every_algorithm_that_trains(algorithm):
    given = {
        **REQUIRED.get(algorithm, {}),
        "exchange": {"codec": "dgc", "ratio": 100, "dense": ["*.head.*"], "policy": {"kind": "auto", "ratios": [50]}},
        "parallel": {"kind": "ddp", "ranks": 2},
        "optimizer": {"kind": "sgd"},
    }
    settings = parse_settings(ALGORITHMS[algorithm], json.dumps(given))
    assert (settings.exchange.name, settings.exchange.ratio, settings.optimizer.momentum) == ("dgc", 100.0, 0.0)
    assert parse_settings(ALGORITHMS[algorithm], settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/train*.toml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_the_settings_of_every_example_are_accepted(path):
    for stage in load_train_config(path).stages:
        if stage.algorithm in ALGORITHMS:
            assert parse_settings(ALGORITHMS[stage.algorithm], json.dumps(dict(stage.settings)))


@pytest.mark.parametrize("algorithm", [name for name, entry in ALGORITHMS.items() if entry.trains])
def test_every_algorithm_that_trains_takes_adapters_of_layers_and_roles(algorithm):
    lora = {"targets": ["q_proj", "v_proj"], "roles": ["solver", "critic"]}
    settings = parse_settings(ALGORITHMS[algorithm], json.dumps({**REQUIRED.get(algorithm, {}), "lora": lora}))
    assert (settings.lora.targets, settings.lora.roles) == (("q_proj", "v_proj"), ("solver", "critic"))


@pytest.mark.parametrize(("steps", "warmup_steps"), [(2, 2), (200, 10)])
def test_the_warm_up_that_is_left_out_is_no_longer_than_the_run(steps, warmup_steps):
    settings = parse_settings(ALGORITHMS["sft"], json.dumps({"steps": steps}))
    assert settings.warmup_steps == warmup_steps
    assert parse_settings(ALGORITHMS["sft"], settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("settings", "place", "text"),
    [
        ({"loss": {"kind": "clipp"}}, "loss", "kind 'clipp' is not one of: clip, gspo, cispo"),
        ({"loss": {"kind": "clipp"}}, "loss", "; did you mean 'clip'?"),
        ({"loss": {"kind": "clip", "hihg": 1}}, "loss.clip.hihg", "no such setting; did you mean 'high'?"),
        ({"loss": {"high": 0.3}}, "loss", "needs a kind: clip, gspo, cispo"),
        ({"exchange": {"codec": "dcg"}}, "exchange", "codec 'dcg' is not one of: none, bf16"),
        ({"exchange": {"codec": "dcg"}}, "exchange", "; did you mean 'dgc'?"),
        ({"exchange": {"ratio": 100.0}}, "exchange", "needs a codec: none, bf16"),
        ({"exchange": {"codec": "dgc", "rato": 1}}, "exchange.dgc.rato", "no such setting; did you mean 'ratio'?"),
        ({"parallel": {"kind": "ddp", "reshard_after_forward": True}}, "parallel.ddp.reshard_after_forward", "no such"),
        ({"parallel": {"kind": "ddp", "ranks": 0}}, "parallel.ddp.ranks", "should be greater than or equal to 1"),
        ({"schedule": "cosin"}, "schedule", "should be one of: constant, linear, cosine"),
        ({"steps": 0}, "steps", "should be greater than or equal to 1"),
    ],
)
def test_a_wrong_setting_says_what_would_be_right(settings, place, text):
    with pytest.raises(SettingsInvalid) as raised:
        parse_settings(ALGORITHMS["grpo"], json.dumps(settings))
    (violation,) = raised.value.violations
    assert violation.field == f"settings.{place}"
    assert text in violation.description


def test_what_toml_cannot_leave_empty_is_switched_off_by_name():
    def parsed(algorithm: str, **settings: object) -> Any:
        return parse_settings(ALGORITHMS[algorithm], json.dumps(settings))

    assert parsed("grpo", explosion_factor="none").explosion_factor is None
    assert parsed("ppo", critic={"clip": "none"}).critic.clip is None
    assert parsed("grpo", correction={"kind": "decoupled", "cap": "none"}).correction.cap is None
    assert parsed("dapo", overlong="none").scoring.overlong is None


def test_what_trains_is_sampled_from_the_whole_distribution_that_the_trainer_computes():
    settings = parse_settings(ALGORITHMS["grpo"], json.dumps({"temperature": 0.7}))
    neutral = dict.fromkeys(RESHAPING)
    assert {"top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"} == {*neutral}
    common = {"max_tokens": settings.answer_tokens, "max_completion_tokens": None, **neutral}
    assert settings.overrides["train"] == {"temperature": 0.7, "top_p": 1.0, **common}
    assert settings.overrides["validation"] == {"temperature": 0, **common}
    assert settings.step_settings.temperature == 0.7


def test_lengths_that_are_left_out_follow_the_longest_answer():
    settings = json.dumps({"max_tokens": 500})
    dapo, dr_grpo = (parse_settings(ALGORITHMS[name], settings) for name in ("dapo", "dr_grpo"))
    assert dapo.scoring.overlong == OverlongSettings(max_tokens=500, buffer_tokens=100)
    assert dr_grpo.objective.aggregation == SequenceMeanTokenSumNorm(length=500)


async def test_every_problem_of_several_engines_is_told_at_once(world, grpo_draft):
    urls = [f"http://10.0.0.{number}:8000/v1" for number in range(4)]
    draft = replace(grpo_draft, settings_json=json.dumps({"engine": {"kind": "external", "base_urls": urls}}))
    rules = CreationRules(registry=ALGORITHMS, external_engines=urls[:2], max_engines=3)
    with pytest.raises(SettingsInvalid) as raised:
        await checked_runs([draft], rules=rules, resources=ModelResources(world), now=now())
    assert [violation.description.partition(" (")[0] for violation in raised.value.violations] == [
        "needs 4 engines; the service has at most 3",
        f"{urls[2]} is not in the service's setting FULMEN_ALGORITHM_EXTERNAL_ENGINES",
        f"{urls[3]} is not in the service's setting FULMEN_ALGORITHM_EXTERNAL_ENGINES",
    ]


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"kind": "vllm"}, "the program 'no-such-vllm' does not exist: install vLLM, or name it"),
        ({"kind": "external", "base_url": "http://10.0.0.7:8000/v1"}, "not in the service's setting"),
    ],
)
async def test_an_unavailable_engine_is_refused_before_anything_is_created(engine, problem, world, grpo_draft):
    draft = replace(grpo_draft, settings_json=json.dumps({"engine": engine}))
    with pytest.raises(SettingsInvalid) as raised:
        await checked_runs(
            [draft],
            rules=CreationRules(registry=ALGORITHMS, vllm_command="no-such-vllm"),
            resources=ModelResources(world),
            now=now(),
        )
    (violation,) = raised.value.violations
    assert violation.field == "settings.engine"
    assert problem in violation.description


async def test_passes_that_the_device_cannot_compute_are_refused_before_anything_is_created(world, grpo_draft):
    draft = replace(grpo_draft, settings_json=json.dumps({"passes": {"attention": "flex_attention", "offload": True}}))
    with pytest.raises(SettingsInvalid) as raised:
        await created(draft, world)
    assert [v.description.partition(":")[0] for v in raised.value.violations] == ["passes.attention", "passes.offload"]


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
async def test_experts_are_not_replayed_in_compiled_layers_or_without_experts(world, grpo_draft, tmp_path, kind):
    async def problems(**config: object) -> list[tuple[str, str]]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = {"engine": {"kind": kind, "router_replay": True}, "passes": {"compile": True}}
        spec = replace(grpo_draft.policy, origin=PolicyOrigin.PATH, source=str(tmp_path))
        draft = replace(grpo_draft, settings_json=json.dumps(settings), policy=spec)
        with pytest.raises(SettingsInvalid) as raised:
            await created(draft, world)
        return [(v.field, v.description.partition(":")[0]) for v in raised.value.violations]

    compiled = ("settings.engine.router_replay", "needs passes.compile to be false")
    dense = ("settings.engine.router_replay", "the model (llama) is not a mixture of experts")
    assert await problems(model_type="llama") == [compiled, dense]
    assert await problems(model_type="llama", num_experts=1) == [compiled, dense]
    assert await problems(model_type="qwen3_moe", num_experts=8) == [compiled]
    assert await problems(text_config={"n_routed_experts": 64}) == [compiled]


async def test_experts_are_not_replayed_in_rows_that_are_split(world, grpo_draft):
    parallel = {"kind": "ddp", "ranks": 2, "context": 2}
    settings = {"engine": {"kind": "embedded", "router_replay": True}, "parallel": parallel}
    with pytest.raises(SettingsInvalid) as raised:
        await created(replace(grpo_draft, settings_json=json.dumps(settings)), world)
    found = [each for each in raised.value.violations if each.field == "settings.engine.router_replay"]
    assert found[0].description.startswith("needs parallel.context 1")


async def test_a_model_whose_rows_cannot_be_split_is_refused_with_every_reason(world, grpo_draft, tmp_path):
    config = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "rope_scaling": {"type": "dynamic"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {**json.loads(grpo_draft.settings_json), "parallel": {"kind": "ddp", "ranks": 2, "context": 2}}
    policy = PolicySpec(name="split", origin=PolicyOrigin.PATH, source=str(tmp_path))
    with pytest.raises(SettingsInvalid) as raised:
        await created(replace(grpo_draft, settings_json=json.dumps(settings), policy=policy), world)
    found = [each.description for each in raised.value.violations if each.field == "settings.parallel"]
    assert found == [
        "context: the model has layers of kind conv, which mix positions otherwise than by attention",
        "context: the model's rotary embeddings are of type dynamic, which depends on the longest position of a pass",
    ]


async def test_engines_are_on_clusters_of_the_operator_and_over_several_machines_on_those_of_ray(world, grpo_draft):
    async def problems(**engine: object) -> list[str]:
        settings = {"engine": {"kind": "vllm", **engine}}
        draft = replace(grpo_draft, settings_json=json.dumps(settings))
        rules = CreationRules(
            registry=ALGORITHMS, vllm_command="no-such-vllm", clusters=["ray", "hpc"], ray_clusters=["ray"]
        )
        try:
            await checked_runs([draft], rules=rules, resources=ModelResources(world), now=now())
        except SettingsInvalid as error:
            return [f"{each.field}: {each.description}" for each in error.violations]
        return []

    assert await problems(cluster="ray", nodes=2, tensor_parallel=8) == []
    assert await problems(cluster="hpc", nodes=2) == [
        "settings.engine: nodes is more than 1, which needs a cluster of kind ray (docs/engines.md)"
    ]
    (unknown,) = await problems(cluster="mine")
    assert unknown.startswith(
        "settings.engine.cluster: 'mine' is not in the service's setting FULMEN_ALGORITHM_CLUSTERS (hpc, ray;"
    )


async def test_a_model_whose_matrices_cannot_be_split_as_asked_is_refused_with_every_reason(
    world, grpo_draft, tmp_path
):
    config = {"model_type": "gpt2", "num_attention_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {**json.loads(grpo_draft.settings_json), "parallel": {"kind": "ddp", "ranks": 2, "tensor": 2}}
    policy = PolicySpec(name="split", origin=PolicyOrigin.PATH, source=str(tmp_path))
    with pytest.raises(SettingsInvalid) as raised:
        await created(replace(grpo_draft, settings_json=json.dumps(settings), policy=policy), world)
    found = [each.description for each in raised.value.violations if each.field == "settings.parallel"]
    assert found == [
        "tensor: transformers has no plan for models of type gpt2",
        "tensor: num_attention_heads, 3 in the model's configuration, is not a multiple of 2",
        "tensor: num_key_value_heads, 3 in the model's configuration, is not a multiple of 2",
    ]


@pytest.mark.parametrize("count", [101, 20_000])
def test_of_very_many_problems_some_are_told_and_the_others_counted(count: int) -> None:
    given = json.dumps({f"learning_rat{number}": 0 for number in range(count)})
    with pytest.raises(SettingsInvalid) as raised:
        parse_settings(ALGORITHMS["grpo"], given if count < 1000 else given[:250_000].rpartition(",")[0] + "}")
    *told, rest = raised.value.violations
    assert len(told) == 100
    assert rest.field == "settings"
    assert rest.description.endswith("more problems are not listed")


def test_settings_are_bounded_and_so_is_what_is_quoted_of_them() -> None:
    for given, field in (({"x" * 300_000: 1}, "settings"), ({"x" * 100_000: 1}, "settings." + "x" * 247)):
        with pytest.raises(SettingsInvalid) as raised:
            parse_settings(ALGORITHMS["grpo"], json.dumps(given))
        assert [each.field for each in raised.value.violations] == [field]
        assert len(str(raised.value)) < 3000


@pytest.mark.parametrize(
    ("algorithm", "given", "field"),
    [
        ("best_of_n", '{"n": 1%s}' % ("0" * 400), "settings.n"),
        ("grpo", '{"validate_every": 9007199254740992}', "settings.validate_every"),
        ("grpo", '{"aggregation": {"kind": "sequence_mean_token_sum_norm", "length": 1%s}}' % ("0" * 30), "length"),
        ("distill", '{"teacher": {"kind": "model", "model": "a\\u0000"}}', "settings.teacher.model.model"),
    ],
)
def test_what_cannot_be_kept_or_computed_with_is_refused(algorithm: str, given: str, field: str) -> None:
    with pytest.raises(SettingsInvalid) as raised:
        parse_settings(ALGORITHMS[algorithm], given)
    assert field in " ".join(each.field for each in raised.value.violations)
    assert not any(len(each.description) > 200 for each in raised.value.violations)
