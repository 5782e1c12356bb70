"""A failure in a validation never makes a policy look better, and the best validated version serves in the end."""

import re
import shutil
from pathlib import Path

import pytest

from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.run_service import POLICY, descriptions, notices, with_settings


@pytest.mark.parametrize("algorithm", ["grpo", "rejection"])
async def test_a_rollout_that_failed_counts_as_failure_reward(algorithm, world, grpo_draft, carry_out):
    # Every other of six validation tasks fails, the others cost something.
    world.fails = lambda name: "validation/" in name and int(name.split("/")[-1].partition(".")[0]) % 2 == 0
    world.reward_of = lambda name: -1.0 if "validation/" in name else float(name.endswith(".0"))
    draft = with_settings(grpo_draft, algorithm=algorithm, steps=1, failure_reward=-5.0, max_staleness=None)
    entry = await carry_out(draft)
    assert entry.run.results["validation_accuracy"] == pytest.approx((3 * -1 + 3 * -5) / 6)
    assert entry.events.steps()[-1].values["validation_failed"] == 3
    assert any(
        "3 of 6 validation rollouts failed (AGENT_ERROR: 3); they count as -5. See why: `fulmen rollout show" in text
        for text in notices(entry)
    )


LORA = {"lora": {"rank": 2, "alpha": 4.0}}
DELTA = {"weights": {"kind": "delta", "dtype": "float32", "dense_above": 1.0}, "learning_rate": 1e-6}


def good_until(version: int):
    """Returns rewards of validations that are 1 up to a version, and 0 after it."""

    def reward(name: str) -> float:
        found = re.search(r"validation/(\d+)/", name)
        return float(name.endswith(".0")) if found is None else float(int(found[1]) <= version)

    return reward


@pytest.mark.parametrize("change", [{}, LORA, DELTA], ids=["full", "lora", "delta"])
async def test_the_best_validated_version_serves_in_the_end(change, world, grpo_draft, carry_out):
    world.reward_of = good_until(3)
    entry = await carry_out(with_settings(grpo_draft, **change))
    best, last = descriptions(world)[2], descriptions(world)[-1]
    assert last["equals"] == f"{POLICY}/versions/3"
    assert (last["sha256"], last["step"]) == (best["sha256"], 2)
    assert world.served is not None
    assert world.served.name == entry.run.policy_version == f"{POLICY}/versions/6"
    assert any("is 0, that of step 2 was 1. The version of step 2 serves from now on." in t for t in notices(entry))
    assert entry.run.results["validation_accuracy_after"] == 0, "it is that of the last weights"
    if change is not LORA:
        assert read_folder(Path(entry.run.model_path)).sha256() == best["sha256"]


async def test_a_best_version_whose_folder_is_gone_does_not_fail_the_run(world, grpo_draft, carry_out):
    good = good_until(3)

    def reward(name: str) -> float:
        if "validation/5/" in name:
            shutil.rmtree(str(descriptions(world)[2]["path"]), ignore_errors=True)
        return good(name)

    world.reward_of = reward
    entry = await carry_out(grpo_draft)
    assert entry.run.policy_version == f"{POLICY}/versions/5"
    assert any("cannot be served; the last one is. The folder of version 3" in text for text in notices(entry))


async def test_the_last_version_serves_if_none_was_better(world, grpo_draft, carry_out):
    world.reward_of = good_until(100)
    run = (await carry_out(grpo_draft)).run
    assert run.policy_version == f"{POLICY}/versions/5"
    assert world.aliases[f"{POLICY}/aliases/best"] == 5


@pytest.mark.parametrize(("good_from", "improved"), [(1, False), (3, True)])
async def test_a_run_whose_validation_did_not_improve_says_so(good_from, improved, world, grpo_draft, carry_out):
    good = good_until(good_from - 1)
    world.reward_of = lambda name: 1 - good(name) if "validation/" in name else good(name)
    told = [text for text in notices(await carry_out(grpo_draft)) if "did not improve" in text]
    assert bool(told) != improved
    assert improved or "1 at the start, 1 after 4 steps" in told[0]
