"""One stack for all end-to-end tests, one after another; each trains under a policy of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.rpc.services import connect
from tests.support.end_to_end import MainJob, World
from tests.support.folders import short_folder
from tests.support.stack import running_stack, stack_targets

SLOTS = 32
MODULES = Path(__file__).parents[2] / "examples/best_of_n/algorithm.py"
# Steps, not seconds: the same figures come out on any machine, give or take what asynchrony changes (0.54 -> 0.93, under
# load, too). Where imitation ends matters: after a warm-up of 40 steps it is a policy that learns slowly (0.55 -> 0.75).
SHORT_FORM = {"sft.steps": "400", "grpo.steps": "8", "grpo.warmup_steps": "4", "grpo.validate_every": "8"}


@pytest.fixture(scope="package")
def world_folder() -> Iterator[Path]:
    """Yields a folder whose path leaves room for the name of a Unix socket; removes it afterwards."""
    with short_folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def world(world_folder: Path) -> AsyncIterator[World]:
    state_dir = world_folder / "s"
    async with (
        running_stack(state_dir, slots=SLOTS, environment={"FULMEN_ALGORITHM_MODULES": str(MODULES)}) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        yield World(stack=stack, client=client, state_dir=state_dir)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def main_job(world: World, world_folder: Path, repository_root: Path) -> MainJob:
    """Does the main job in its short form, once for all tests."""
    overrides = [word for setting, value in SHORT_FORM.items() for word in ("--set", f"{setting}={value}")]
    reports = world_folder / "reports"
    config = repository_root / "examples/arithmetic/train.toml"
    done = await world.fulmen("train", config, *overrides, "--report-dir", reports)
    assert done.status == 0, done.stdout + done.stderr
    return MainJob(done=done, reports=reports)
