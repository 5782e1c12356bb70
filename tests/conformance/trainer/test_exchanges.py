"""Ranks that exchange gradients through codecs learn what one process learns, and resume bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.trainers.calls import OPEN
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, ParallelSettings
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import (
    AdamW,
    BatchSettings,
    OptimizerSettings,
    Sgd,
    StepResult,
    StepSettings,
    UpdateRule,
)
from fulmen_exchange.registry import ExchangeSettings
from tests.support.algorithm.trainers import weights_of
from tests.support.algorithm.warm import here
from tests.support.soak import long_but

pytestmark = [
    pytest.mark.long(short=True),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until a group of processes with torch has started
]

STEP = StepSettings(token_budget=64, planned_steps=0, total_steps=20)
BATCH = BatchSettings(minibatches=2)
PARALLEL: dict[str, ParallelSettings] = {"ddp": Ddp(ranks=2), "fsdp2": Fsdp2(ranks=4, shard=2)}
"""Two ranks with a copy of the weights each, and two copies in two parts."""
SMALL = {"dense_below": 16, "check_every": 1}
"""The matrices of a tiny model are compressed, too, and every round compares the weights of all ranks."""
SETTINGS: TypeAdapter[ExchangeSettings] = TypeAdapter(ExchangeSettings)
STATEFUL = [
    {"codec": "dgc", "ratio": 20.0},
    {"codec": "topk", "ratio": 20.0},
    {"codec": "topk_quantised", "ratio": 20.0},
    {"codec": "powersgd"},
    {"codec": "qsgd", "bits": 4},
    {"codec": "double_quantization"},
    {"codec": "topk_quantised", "ratio": 20.0, "outer": {"kind": "outer", "steps": 2}},
]


SetupOf = Callable[[dict[str, object] | None, UpdateRule], TrainerSetup]


@pytest.fixture(scope="module", params=long_but(["fsdp2"], PARALLEL))
def setup_of(model_dir: Path, request: pytest.FixtureRequest) -> SetupOf:
    """Returns what makes the setup of a group; without an exchange gradients go as they are."""

    def made(given: dict[str, object] | None, rule: UpdateRule) -> TrainerSetup:
        return TrainerSetup(
            model_dir=model_dir,
            optimizer=OptimizerSettings(learning_rate=1e-3, rule=rule),
            seed=3,
            compute=ComputeSettings(parallel=PARALLEL[request.param]),
            exchange=None if given is None else SETTINGS.validate_python({**SMALL, **given}),
        )

    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(setup_of: SetupOf) -> AsyncIterator[RankGroupTrainer]:
    """Yields a group whose processes every test opens its own trainer in."""
    trainer = await RankGroupTrainer.open(setup_of(None, AdamW()), GroupOptions(cluster=here()))
    yield trainer
    await trainer.close()


async def steps(trainer: Trainer, rows: Sequence[Row], *, first: int = 0, count: int = 3) -> list[StepResult]:
    """Takes some training steps, of two optimiser steps each."""
    results = []
    for step in range(first, first + count):
        placed = replace(STEP, planned_steps=2 * step)
        results += await trainer.train(rows, settings=placed, batch=BATCH, seed=step, current_version=3)
    return results


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("rule", long_but([AdamW()], [AdamW(), Sgd(momentum=0.9)]), ids=["adamw", "sgd"])
async def test_what_loses_little_learns_what_one_process_learns(codec, rule, group, rows, setup_of):
    thread = TorchThread(torch_threads=1)
    try:
        setup = setup_of({"codec": codec}, rule)
        alone = await InProcessTrainer.open(
            replace(setup, compute=ComputeSettings(), exchange=None), thread=thread, device="cpu"
        )
        await group._call(OPEN, setup=setup)
        for mine, yours in zip(await steps(group, rows), await steps(alone, rows), strict=True):
            assert mine.loss == pytest.approx(yours.loss, abs=2e-6 if codec == "none" else 2e-3)
            assert mine.grad_norm == pytest.approx(yours.grad_norm, rel=1e-4 if codec == "none" else 0.02)
            assert mine.exchange["exchange_sent_bytes"] > 0
            assert not yours.exchange
    finally:
        thread.close()


@pytest.mark.parametrize(
    "given",
    long_but([STATEFUL[0], STATEFUL[3], STATEFUL[6]], STATEFUL),
    ids=lambda given: "-".join(map(str, given.values()))[:40],
)
async def test_training_resumes_bit_for_bit_with_its_residuals(given, group, rows, setup_of, tmp_path):
    codec = SETTINGS.validate_python(given)
    # With an outer loop each rank has moments of its own.
    rule = Sgd() if codec.sgd_only and codec.outer.kind == "every_step" else AdamW()
    setup = setup_of(given, rule)
    await group._call(OPEN, setup=setup)
    await steps(group, rows, count=2)
    (tmp_path / "state").mkdir()
    await group.write_state(tmp_path / "state")
    results = await steps(group, rows, first=2, count=2)
    uninterrupted = await weights_of(group, tmp_path / "uninterrupted")
    await group._call(OPEN, setup=setup)
    await group.read_state(tmp_path / "state")
    again = await steps(group, rows, first=2, count=2)
    assert [each.loss for each in again] == [each.loss for each in results]
    assert await weights_of(group, tmp_path / "resumed") == uninterrupted


async def test_what_is_kept_back_is_a_file_of_each_rank(group, rows, setup_of, tmp_path):
    await group._call(OPEN, setup=setup_of({"codec": "dgc", "ratio": 20.0}, Sgd()))
    await steps(group, rows, count=1)
    await group.write_state(tmp_path)
    assert {file.name for file in tmp_path.glob("exchange-*")} == {
        f"exchange-{rank:05d}.pt" for rank in range(len(group.pids))
    }


async def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all_and_keeps_nothing(
    group, rows, setup_of, tmp_path
):
    broken = [replace(rows[0], advantages=tuple(3e38 if m else 0.0 for m in rows[0].loss_mask)), *rows[1:]]
    setup = setup_of({"codec": "dgc", "ratio": 20.0}, Sgd())
    found = []
    for spoiled in (True, False):
        await group._call(OPEN, setup=setup)
        if spoiled:
            [result] = await group.train(broken, settings=STEP, batch=BatchSettings(), seed=0, current_version=3)
            assert result.skipped
        await steps(group, rows, count=2)
        found.append(await weights_of(group, tmp_path / str(spoiled)))
    assert found[0] == found[1]


async def test_metrics_show_what_was_sent_and_what_it_cost(group, rows, setup_of):
    exchange = {"codec": "dgc", "ratio": 20.0, "policy": {"kind": "fixed", "warmup_rounds": 0}}
    await group._call(OPEN, setup=setup_of(exchange, Sgd()))
    results = await steps(group, rows)
    for result in results:
        assert result.exchange["exchange_ratio"] > 4
        assert result.exchange["exchange_raw_bytes"] > result.exchange["exchange_sent_bytes"] > 0
        assert 0 < result.exchange_s < result.seconds
        assert result.as_metrics()["exchange_ratio"] == result.exchange["exchange_ratio"]


async def test_auto_measures_and_reports_below_which_bandwidth_compression_pays(group, rows, setup_of):
    exchange = {"codec": "none", "policy": {"kind": "auto", "probe_rounds": 1}}
    await group._call(OPEN, setup=setup_of(exchange, AdamW()))
    told = [text for result in await steps(group, rows, count=5) for text in result.events]
    assert any("compression pays off below" in text for text in told), told
