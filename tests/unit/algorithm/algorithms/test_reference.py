"""The frozen reference of a KL penalty, and the variants of GRPO, each in a whole run."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live

OpenService = Callable[[World], Service]


def with_settings(draft: RunDraft, **settings: object) -> RunDraft:
    return replace(draft, settings_json=json.dumps({**json.loads(draft.settings_json), **settings}))


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


async def finished(draft: RunDraft, world: World, open_service: OpenService) -> list[dict[str, float]]:
    """Runs a draft to its end; returns the metrics of its steps."""
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    return [dict(step.values) for step in service.runs.entry(run.name).events.steps()]


async def test_the_reference_stays_what_the_run_began_with_though_that_is_gone_when_it_goes_on(
    world: World, grpo_draft: RunDraft, open_service: OpenService, tiny_model: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(tiny_model, first)
    draft = replace(
        with_settings(grpo_draft, kl={"kind": "loss", "coefficient": 0.01}, learning_rate=0.01, warmup_steps=0),
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source=str(first)),
    )
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    # After the checkpoint of step 2, before that of the end.
    world.crashes = Crashes(at_call=29)
    assert not await live(service, run, world.crashes)
    reference = tmp_path / "state/runs/small/reference"
    assert weights_of(reference) == weights_of(tiny_model)
    shutil.rmtree(first)

    world.crashes, world.changed = Crashes(), asyncio.Event()
    service = open_service(world)
    assert await live(service, run, world.crashes)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    by_step = {step.step: step.values for step in service.runs.entry(run.name).events.steps()}
    assert by_step[1]["kl_reference"] == pytest.approx(0, abs=1e-9)
    # Had the checkpoint become the reference, the step after it would show no divergence.
    assert by_step[3]["kl_reference"] > 1e-6
    assert weights_of(reference) == weights_of(tiny_model)


async def test_a_penalty_in_the_reward_moves_groups_whose_rewards_alone_would_not_say_how(
    world: World, grpo_draft: RunDraft, open_service: OpenService
) -> None:
    draft = with_settings(grpo_draft, steps=1, kl={"kind": "reward", "coefficient": 0.5})
    metrics = (await finished(draft, world, open_service))[-1]
    # The made-up rollouts have log mu = -3 at their two tokens.
    assert metrics["kl_penalty_mean"] == pytest.approx(0.5 * 2 * metrics["kl_reference_sampler"])
    assert metrics["kl_reference_sampler"] != 0


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "cispo"])
async def test_every_variant_carries_a_run_out(
    algorithm: str, world: World, grpo_draft: RunDraft, open_service: OpenService
) -> None:
    draft = replace(with_settings(grpo_draft, steps=1, max_tokens=10), algorithm=algorithm)
    metrics = (await finished(draft, world, open_service))[-1]
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
            "no dimension of the rewards",
        ),
    ],
)
async def test_settings_that_do_not_fit_are_told_before_the_run_exists(
    settings: dict[str, object], problem: str, world: World, grpo_draft: RunDraft
) -> None:
    with pytest.raises(SettingsInvalid) as failure:
        await created(with_settings(grpo_draft, **settings), world)
    assert problem in "\n".join(f"{v.field}: {v.description}" for v in failure.value.violations)
