"""Agents with roles: which rows train, which adapter they change, and how a mismatch fails the run."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.algorithms.scoring import Scorer
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.run_service import descriptions, kills, run_folder, with_settings
from tests.support.algorithm.scored_rollouts import settings_of, team

ROLES = ("planner", "solver")
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"], "roles": list(ROLES)}


def digests(folder: Path) -> dict[str, str]:
    return {r: hashlib.sha256((folder / r / "adapter_model.safetensors").read_bytes()).hexdigest() for r in ROLES}


@pytest.mark.parametrize("trains", [("planner",), ("solver",), ()])
async def test_rows_change_the_adapter_of_their_role_alone_whenever_the_process_is_killed(
    trains, world, grpo_draft, carry_out, tmp_path
):
    world.chance = random.Random(len(trains))
    world.roles = {role: ("tiny", f"tiny.{role}") for role in ROLES}
    settings = {"lora": LORA, "roles": {"train": list(trains)}, "learning_rate": 1e-2, "warmup_steps": 0, "steps": 2}
    await carry_out(with_settings(grpo_draft, **settings), killed=kills(world.chance, calls=30, lives=1))
    folders = sorted((run_folder(tmp_path) / "models").glob("epoch-*/*"))
    assert all(described["adapters"] == list(ROLES) for described in descriptions(world))
    first, *_, last = (digests(folder) for folder in folders)
    assert {role for role in ROLES if first[role] != last[role]} == set(trains or ROLES)
    checkpoint = sorted((run_folder(tmp_path) / "checkpoints").iterdir())[-1]
    assert digests(checkpoint / "model") == last
    assert world.served is not None
    assert world.served.model_names == ("tiny", "tiny.planner", "tiny.solver")


@pytest.mark.parametrize("model", ["tiny", "tiny.solver"])
async def test_a_role_that_asks_for_another_model_than_its_own_fails_the_run(model, world, grpo_draft, carry_out):
    world.roles = {"planner": ("tiny", model), "solver": ("tiny", "tiny.solver")}
    entry = await carry_out(with_settings(grpo_draft, lora=LORA), state=RunState.FAILED)
    assert entry.run.failure_message == (
        f"The role 'planner' called the model {model}; with lora.roles it must call tiny.planner."
    )


async def test_one_adapter_is_trained_while_the_other_roles_ask_for_the_weights_as_they_are(
    world, grpo_draft, carry_out
):
    world.roles = {"planner": ("tiny", "tiny.planner"), "solver": ("tiny", "tiny")}
    settings = {"lora": {**LORA, "roles": ["planner"]}, "roles": {"train": ["planner"]}, "steps": 1}
    await carry_out(with_settings(grpo_draft, **settings))


async def test_rows_of_another_policy_do_not_train(world, grpo_draft, carry_out, tmp_path):
    world.roles = {"planner": ("tiny", "tiny"), "solver": ("elsewhere", "elsewhere")}
    entry = await carry_out(with_settings(grpo_draft, steps=1))
    [step] = [each.values for each in entry.events.steps() if each.step]
    assert step["rows"] == step["role_planner_rows"] > 0
    assert step["tokens"] == step["role_planner_tokens"]


async def test_a_run_whose_policy_no_role_calls_fails_and_says_so(world, grpo_draft, carry_out):
    world.roles = {"solver": ("elsewhere", "elsewhere")}
    entry = await carry_out(grpo_draft, state=RunState.FAILED)
    assert "no call of the policy tiny" in entry.run.failure_message


def test_what_another_policy_sampled_does_not_train():
    finished, trajectory = team("a", 1.0, None, 2)
    foreign = [replace(s, policy="other" if s.role == "worker" else "mine") for s in trajectory.sequences]
    scorer = Scorer(settings_of(), policy="mine")
    scored = scorer.score("g", finished, replace(trajectory, sequences=tuple(foreign)))
    assert [s.role for s in scored.sequences] == ["planner"]
    alone = replace(trajectory, sequences=tuple(s for s in foreign if s.role == "worker"))
    assert scorer.problem(alone) == "no call of the policy mine"
    # Nobody's is everybody's: rows of before it was noted, or of a source that does not say.
    assert len(scorer.score("g", finished, trajectory).sequences) == 3


def test_rewards_of_roles_and_dimensions_are_shown_beside_the_total():
    roles = {"baseline": "role", "rewards": {"planner": "plan"}}
    assert Scorer(settings_of(roles=roles)).parts(team("a", 1.0, 0.2, 1)[0]) == {"role_planner_reward": 0.2}
    weighed = Scorer(settings_of(rewards={"weights": {"reward": 2.0, "plan": 0.5}}))
    assert weighed.parts(team("a", 1.0, 0.2, 1)[0]) == {"reward_reward": 1.0, "reward_plan": 0.2}
    assert Scorer(settings_of()).parts(team("a", 1.0, 0.2, 1)[0]) == {}
