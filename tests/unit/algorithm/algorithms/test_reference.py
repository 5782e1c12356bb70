"""The frozen reference of a KL penalty, and the variants of GRPO, each in a whole run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec
from tests.support.algorithm.model_services import Crashes
from tests.support.algorithm.run_service import created, run_folder, with_settings


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


async def test_the_reference_stays_the_first_policy_after_a_restart_without_its_files(
    world, grpo_draft, carry_out, tiny_model, tmp_path
):
    first = tmp_path / "first"
    shutil.copytree(tiny_model, first)
    draft = replace(
        with_settings(grpo_draft, kl={"kind": "loss", "coefficient": 0.01}, learning_rate=0.01, warmup_steps=0),
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source=str(first)),
    )
    reference = run_folder(tmp_path) / "reference"

    def killed():
        yield Crashes(at_call=29)  # after the checkpoint of step 2, before that of the end
        assert weights_of(reference) == weights_of(tiny_model)
        shutil.rmtree(first)

    entry = await carry_out(draft, killed=killed())
    assert not first.exists(), "the run was killed"
    by_step = {step.step: step.values for step in entry.events.steps()}
    assert by_step[1]["kl_reference"] == pytest.approx(0, abs=1e-9)
    # Had the checkpoint become the reference, the step after it would show no divergence.
    assert by_step[3]["kl_reference"] > 1e-6
    assert weights_of(reference) == weights_of(tiny_model)


async def test_a_penalty_in_the_reward_trains_groups_of_equal_rewards(world, grpo_draft, carry_out):
    draft = with_settings(grpo_draft, steps=1, kl={"kind": "reward", "coefficient": 0.5})
    metrics = (await carry_out(draft)).events.steps()[-1].values
    # The made-up rollouts have log mu = -3 at their two tokens.
    assert metrics["kl_penalty_mean"] == pytest.approx(0.5 * 2 * metrics["kl_reference_sampler"])
    assert metrics["kl_reference_sampler"] != 0


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "cispo"])
async def test_every_variant_carries_a_run_out(algorithm, world, grpo_draft, carry_out):
    draft = with_settings(grpo_draft, algorithm=algorithm, steps=1, max_tokens=10)
    metrics = (await carry_out(draft)).events.steps()[-1].values
    assert metrics["optimizer_steps"] == 1
    assert metrics["skipped"] == 0
    if algorithm == "dapo":
        assert metrics["reward_overlong_mean"] == 0.0  # two tokens are far from ten


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"clip_low": 0.1}, "settings.clip_low: no such setting"),
        ({"loss": {"kind": "gspo", "dual_clip": 3.0}}, "settings.loss.gspo.dual_clip: no such setting"),
        ({"proximal": "sampler"}, "against the sampler already"),
        ({"kl": {"kind": "reward"}, "advantage": {"kind": "maxrl"}}, "which maxrl cannot use"),
        ({"kl": {"kind": "reward"}, "credit": {"kind": "step_groups"}}, "needs credit by rollout"),
        (
            {"kl": {"kind": "reward"}, "rewards": {"weights": {"reward": 1.0}, "normalise": "gdpo"}},
            "not one of the reward dimensions",
        ),
    ],
)
async def test_settings_that_do_not_fit_are_refused_before_the_run_exists(settings, problem, world, grpo_draft):
    with pytest.raises(SettingsInvalid) as failure:
        await created(with_settings(grpo_draft, **settings), world)
    assert problem in "\n".join(f"{v.field}: {v.description}" for v in failure.value.violations)
