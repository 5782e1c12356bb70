"""Published versions can always be rebuilt: from deltas, from adapters, after crashes and rollbacks."""

import json
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.model_roots import ANY_FOLDER
from fulmen_algorithm.policy.policy import Policy
from fulmen_algorithm.policy.stored_weights import stored_policy
from fulmen_algorithm.runs.creation.rules import SettingsInvalid
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.model_services import ModelResources
from tests.support.algorithm.run_service import (
    POLICY,
    created,
    descriptions,
    kills,
    run_folder,
    run_journal,
    with_settings,
)
from tests.support.soak import long_after

WEIGHTS = {"kind": "delta", "dtype": "bfloat16", "full_every": 3, "dense_above": 1.0}
# In a model this small a delta is smaller than the weights only if little moves.
DELTA = {"weights": WEIGHTS, "learning_rate": 1e-6}


async def test_versions_are_deltas_and_from_time_to_time_whole(world, grpo_draft, carry_out, tmp_path):
    run = (await carry_out(with_settings(grpo_draft, steps=6, **DELTA))).run
    kinds = [str(d["kind"]) for d in descriptions(world)]
    # The first and every third one, and the last, which is what the run leaves behind.
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert world.kinds == [WeightsKind(kind) for kind in kinds]
    first, second = descriptions(world)[:2]
    assert (second["base"], second["base_sha256"]) == (f"{POLICY}/versions/1", first["sha256"])
    assert read_folder(Path(run.model_path)).sha256() == descriptions(world)[-1]["sha256"]
    steps = [
        json.loads(line)["step"]["values"]
        for line in (run_journal(tmp_path) / "events.jsonl").read_text().splitlines()
        if '"publish_seconds"' in line
    ]
    assert steps
    assert all(s["publish_bytes_full"] > 0 for s in steps)
    assert any("delta_changed_share" in s for s in steps)


async def test_folders_are_removed_beside_the_event_loop(world, grpo_draft, carry_out, monkeypatch):
    remove, threads = shutil.rmtree, []

    def noted(path: Path, ignore_errors: bool = False) -> None:
        threads.append((path.parent.name, threading.get_ident()))
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", noted)
    await carry_out(grpo_draft)
    assert {folder for folder, _ in threads} >= {"epoch-00000001", "checkpoints"}
    assert threading.get_ident() not in {thread for _, thread in threads}


@pytest.mark.parametrize("trial", long_after(1, range(2)))
@pytest.mark.parametrize(
    "change",
    [DELTA, {"lora": {"rank": 2, "alpha": 4.0}}],
    ids=["delta", "lora"],
)
async def test_a_run_that_is_killed_serves_no_weights_but_those_of_the_version(
    trial, change, world, grpo_draft, carry_out
):
    world.chance = random.Random(trial)
    run = (await carry_out(with_settings(grpo_draft, **change), killed=kills(world.chance, calls=30, lives=2))).run
    assert run.step == 4
    # The last one served is the last one published, whatever was published and never served.
    assert world.served is not None
    assert world.served.name == run.policy_version
    assert world.aliases[f"{POLICY}/aliases/best"] <= world.served.version
    # Every version that is left can be served by another run, and is what it says.
    resources, files = ModelResources(world), RunFiles(Path(run.model_path).parents[2])
    newest = await resources.get(run.policy_version)
    stored = await stored_policy(newest, resources=resources, files=files, roots=ANY_FOLDER)
    assert (await stored.model_folder() / "model.safetensors").exists()


async def test_a_run_begins_with_a_version_that_is_a_delta(world, grpo_draft, carry_out):
    world.reward_of = lambda name: float(name.endswith(".0"))
    await carry_out(with_settings(grpo_draft, steps=3, **DELTA))
    assert [d["kind"] for d in descriptions(world)] == ["full", "delta", "delta", "full"]
    version = PolicySpec(name="tiny", origin=PolicyOrigin.VERSION, source=f"{POLICY}/versions/3")
    second = replace(grpo_draft, name="projects/default/trainingRuns/second", policy=version)
    world.feed.clear()
    world.groups.clear()
    await carry_out(second)
    begun = descriptions(world)[4]
    assert begun["parent"] == ""
    assert begun["dtype"] == "float32"


async def test_adapters_are_small_and_a_run_leaves_a_merged_model(world, grpo_draft, carry_out, tmp_path):
    draft = with_settings(grpo_draft, lora={"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]})
    run = (await carry_out(draft)).run
    described = descriptions(world)
    assert {d["kind"] for d in described} == {"lora"}
    assert described[-1]["merged"] == run.model_path
    assert described[0]["sha256"] != described[-1]["sha256"]
    checkpoint = sorted((run_folder(tmp_path) / "checkpoints").iterdir())[-1]
    saved = sum(file.stat().st_size for file in (checkpoint / "model").rglob("*.safetensors"))
    assert saved < (Path(run.model_path) / "model.safetensors").stat().st_size / 2


async def test_deltas_of_adapters_are_refused(world, grpo_draft):
    with pytest.raises(SettingsInvalid) as refused:
        await created(with_settings(grpo_draft, lora={}, **DELTA), world)
    assert "adapters have no deltas" in str(refused.value.violations)


async def test_a_run_whose_rollouts_are_of_no_role_that_has_an_adapter_fails_and_says_so(world, grpo_draft, carry_out):
    entry = await carry_out(with_settings(grpo_draft, lora={"roles": ["planner"]}), state=RunState.FAILED)
    assert entry.run.failure_message == "There is no adapter for the role '': lora.roles has planner."


async def test_an_older_version_is_published_again_and_says_which_it_is(world, grpo_draft, carry_out, monkeypatch):
    rolled: list[str] = []
    publish = Policy.publish

    async def publish_and_rollback(policy: Policy, *, behind: bool = False) -> int:
        version = await publish(policy, behind=behind)
        if version == 3 and not rolled:
            rolled.append((await policy.rollback(2)).name)
            assert world.served is not None
            assert world.served.version == 4
            with pytest.raises(RunFailed, match="unknown"):
                await policy.rollback(77)
        return version

    monkeypatch.setattr(Policy, "publish", publish_and_rollback)
    run = (await carry_out(with_settings(grpo_draft, **DELTA))).run
    assert rolled == [f"{POLICY}/versions/4"]
    second, fourth = descriptions(world)[1], descriptions(world)[3]
    assert fourth["equals"] == f"{POLICY}/versions/2"
    assert (fourth["kind"], fourth["sha256"], fourth["step"]) == ("full", second["sha256"], second["step"])
    # What was trained is published again after the next step.
    assert world.served is not None
    assert world.served.name == run.policy_version


async def test_weights_whose_delta_is_gone_say_so_and_not_where_it_was(tmp_path, tiny_model):
    chain = [ChainLink(path=tiny_model, sha256=""), ChainLink(path=tmp_path / "gone", sha256="1" * 64)]
    with pytest.raises(RunFailed) as failed:
        await RunFiles(tmp_path / "run").rebuild_model(chain, 7)
    assert failed.value.message == "The weights of step 7 cannot be rebuilt: No such file or directory"
