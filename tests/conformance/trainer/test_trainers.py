"""Every kind of trainer computes the same from the same rows, and resumes from the state of another."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.losses.objectives import LossKl, Objective
from fulmen_algorithm.policy.trainer import Trainer
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.calls import OPEN
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.files import OtherArchitecture
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, LoraSettings, StepResult, StepSettings, WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE, apply
from fulmen_algorithm.weights.publishing import WeightsOrder
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.models import small_model
from tests.support.algorithm.trainers import weights_of
from tests.support.processes import alive

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until a group of processes with torch has started
]

STEP = StepSettings(token_budget=64, objective=Objective(kl=LossKl(coefficient=0.1)))
BATCH = BatchSettings(minibatches=2)
ROLES = ("planner", "solver")


async def steps(trainer: Trainer, rows: Sequence[Row], *, first: int = 0, count: int = 3) -> list[StepResult]:
    """Takes some training steps, of two optimiser steps each."""
    results = []
    for step in range(first, first + count):
        results += await trainer.train(rows, settings=STEP, batch=BATCH, seed=step, current_version=3)
    return results


def assert_same(one: Sequence[StepResult], other: Sequence[StepResult]) -> None:
    """Compares what does not depend on how rows share micro-batches."""
    assert len(one) == len(other)
    for mine, yours in zip(one, other, strict=True):
        assert (mine.skipped, mine.learning_rate) == (yours.skipped, yours.learning_rate)
        assert mine.loss == pytest.approx(yours.loss, abs=2e-6)
        assert mine.grad_norm == pytest.approx(yours.grad_norm, rel=1e-4)
        assert mine.metrics == pytest.approx(yours.metrics, rel=1e-3, abs=1e-5)


async def state_of(trainer: Trainer, folder: Path) -> Path:
    folder.mkdir()
    await trainer.write_state(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def beginning(alone: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await state_of(alone, tmp_path_factory.mktemp("states") / "beginning")


@pytest.fixture
def start(beginning: Path) -> Callable[[Trainer], Awaitable[None]]:
    """Returns what puts a trainer back to untrained weights."""
    return lambda trainer: trainer.read_state(beginning)


async def test_losses_norms_and_metrics_are_those_of_one_process(alone, group, rows, start):
    await start(alone)
    await start(group)
    assert_same(await steps(group, rows), await steps(alone, rows))
    mine, yours = await group.logprobs(rows, settings=STEP), await alone.logprobs(rows, settings=STEP)
    for one, other, row in zip(mine, yours, rows, strict=True):
        assert len(one) == len(row.token_ids)
        assert one[1:] == pytest.approx(other[1:], abs=1e-4)


async def test_supervised_steps_are_those_of_one_process(alone, group, rows, start):
    await start(alone)
    await start(group)
    for part in (rows[:3], rows[3:4], rows):  # the second has fewer rows than there are ranks
        one, other = [await t.train_supervised(part, settings=STEP) for t in (group, alone)]
        assert_same([one], [other])


async def test_a_step_without_a_row_is_no_step(alone, group):
    assert [await steps(trainer, []) for trainer in (group, alone)] == [[], []]


async def test_the_frozen_reference_is_the_first_policy_for_ever(alone, group, rows, start):
    await start(group)
    before = await group.reference_logprobs(rows, settings=STEP)
    await steps(group, rows, count=1)
    assert await group.reference_logprobs(rows, settings=STEP) == before
    for one, other in zip(before, await alone.reference_logprobs(rows, settings=STEP), strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=1e-5)


async def test_the_reward_model_scores_on_ranks_as_in_one_process(alone, group, rows, start):
    await start(group)
    before = await group.reward_logprobs(rows, settings=STEP)
    await steps(group, rows, count=1)
    assert await group.reward_logprobs(rows, settings=STEP) == before
    for one, other in zip(before, await alone.reward_logprobs(rows, settings=STEP), strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=1e-5)


async def test_a_trainer_resumes_from_the_state_of_another(alone, group, rows, start, tmp_path):
    for writer, reader in ((alone, group), (group, alone)):
        await start(writer)
        await steps(writer, rows, count=2)
        state = await state_of(writer, tmp_path / f"by-{type(writer).__name__}")
        await start(reader)
        await reader.read_state(state)
        assert_same(await steps(reader, rows, first=2, count=2), await steps(writer, rows, first=2, count=2))


async def test_the_same_number_of_ranks_resumes_bit_for_bit(group, rows, start, tmp_path):
    await start(group)
    await steps(group, rows, count=1)
    state = await state_of(group, tmp_path / "state")
    await steps(group, rows, first=1, count=2)
    uninterrupted = await weights_of(group, tmp_path / "uninterrupted")
    await start(group)
    await group.read_state(state)
    await steps(group, rows, first=1, count=2)
    assert await weights_of(group, tmp_path / "resumed") == uninterrupted


async def test_the_same_weights_are_the_same_files(alone, group, rows, start, tmp_path):
    await start(alone)
    await steps(alone, rows, count=1)
    await group.read_state(await state_of(alone, tmp_path / "state"))
    one, other = [await weights_of(t, tmp_path / type(t).__name__) for t in (alone, group)]
    assert one == other


async def test_the_same_changes_are_the_same_delta(alone, group, rows, start, tmp_path):
    order = WeightsOrder(dtype="bfloat16", keep=True)
    await start(alone)
    deltas = []
    await steps(alone, rows, count=1)
    changed = await state_of(alone, tmp_path / "state")
    for trainer in (alone, group):
        await start(trainer)
        folder = tmp_path / type(trainer).__name__
        full = await trainer.write_weights(folder / "full", order)
        await trainer.read_state(changed)
        # A small model is changed by so much that all weights would be smaller.
        delta = await trainer.write_weights(folder / "delta", replace(order, base_sha256=full.sha256, dense_above=2.0))
        assert delta.kind is WeightsKind.DELTA
        applied = apply(read_folder(folder / "full"), folder / "delta" / DELTA_FILE)
        assert applied.sha256() == delta.sha256 != full.sha256
        dense = await trainer.write_weights(folder / "dense", replace(order, base_sha256=full.sha256, dense_above=0.0))
        assert (dense.kind, dense.sha256) == (WeightsKind.FULL, delta.sha256)
        deltas.append((folder / "delta" / DELTA_FILE).read_bytes())
    assert deltas[0] == deltas[1]


async def test_a_call_that_is_refused_changes_nothing_and_is_refused_alike(alone, group, rows, start, tmp_path):
    (tmp_path / "other").mkdir()
    other = small_model(tmp_path / "other/model", hidden=16).parent
    (tmp_path / "file").touch()
    texts = []
    for trainer in (alone, group):
        await start(trainer)
        with pytest.raises(ValueError, match="the budget is 3") as too_long:
            await trainer.train(rows, settings=replace(STEP, token_budget=3), batch=BATCH, seed=0, current_version=0)
        with pytest.raises(OtherArchitecture):
            await trainer.read_state(other)
        with pytest.raises(OSError):  # noqa: PT011  (the system's own text)
            await trainer.write_state(tmp_path / "file")
        with pytest.raises(OSError):  # noqa: PT011  (the system's own text)
            await trainer.write_weights(tmp_path / "file/below", WeightsOrder())
        texts.append(str(too_long.value))
    assert texts[0] == texts[1]
    assert_same(await steps(group, rows, count=1), await steps(alone, rows, count=1))


async def test_a_step_that_is_not_finite_is_skipped_on_every_rank(alone, group, rows, start, tmp_path):
    # Only one row is spoiled, so only one rank sees it: its gradient overflows.
    broken = [replace(rows[0], advantages=tuple(3e38 if m else 0.0 for m in rows[0].loss_mask)), *rows[1:]]
    for trainer in (alone, group):
        await start(trainer)
        result = (await trainer.train(broken, settings=STEP, batch=BatchSettings(), seed=0, current_version=3))[0]
        assert result.skipped
        assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    assert_same(await steps(group, rows, count=1), await steps(alone, rows, count=1))


@pytest.mark.parametrize("what", ["adapters", "critic"])
async def test_adapters_and_a_critic_are_the_same_in_one_process(what, group, setup, rows, tmp_path):
    if what == "adapters" and setup.compute.parallel.tensor > 1:
        pytest.skip("adapters of split matrices are refused")
    if what == "adapters":
        # Sharded weights have one adapter.
        roles = ROLES if isinstance(setup.compute.parallel, Ddp) else ()
        changed = replace(setup, lora=LoraSettings(rank=4, alpha=8.0, roles=roles))
    else:
        changed = replace(setup, critic=CriticPlan())
    told = [
        replace(
            row,
            role=ROLES[index // 2 % 2],  # rows of one rollout come in pairs
            rewards=(0.0,) * (len(row.token_ids) - 1) + (float(index % 3),),
        )
        for index, row in enumerate(rows)
    ]
    thread = TorchThread(torch_threads=1)
    try:
        alone = await InProcessTrainer.open(replace(changed, compute=ComputeSettings()), thread=thread, device="cpu")
        await group._call(OPEN, setup=changed)  # in the same processes, which are dear
        assert_same(await steps(group, told, count=2), await steps(alone, told, count=2))
        state = await state_of(group, tmp_path / "state")
        await steps(alone, told, first=2, count=1)
        await alone.read_state(state)
        assert_same(await steps(group, told, first=2, count=1), await steps(alone, told, first=2, count=1))
        await group.read_state(await state_of(alone, tmp_path / "back"))
        assert_same(await steps(group, told, first=3, count=1), await steps(alone, told, first=3, count=1))
    finally:
        await group._call(OPEN, setup=setup)
        thread.close()


async def test_a_rank_that_is_killed_takes_the_group_with_it(group, rows):
    pids = list(group.pids)
    # It stops first, so that the others are in the middle of the step when it dies.
    os.kill(group.pids[1], signal.SIGSTOP)
    call = asyncio.create_task(steps(group, rows, count=1))
    await asyncio.sleep(0)
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(TrainerLost, match="trainer"):
        await call
    with pytest.raises(TrainerLost):
        await group.logprobs(rows, settings=STEP)
    assert not any(map(alive, pids))
