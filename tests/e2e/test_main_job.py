"""The main job in a short form: what `fulmen train` promises a newcomer, on a real stack."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import World
from tests.support.oracle import collect_books, problems_of

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

LAST_LINE = re.compile(r"validation accuracy (\d\.\d\d) -> (\d\.\d\d)")
PNG = b"\x89PNG"
# Steps, not seconds: the same figures come out on any machine, give or take what asynchrony changes.
SHORT = ("--set", "grpo.steps=24")
MARGIN = 0.1
ARITHMETIC_CALLS = 1


async def test_arithmetic_is_learned_and_every_rollout_is_accounted_for(world: World, repository_root: Path) -> None:
    reports = world.state_dir / "reports-of-the-test"

    done = await world.fulmen(
        "train", repository_root / "examples/arithmetic/train.toml", *SHORT, "--report-dir", reports
    )

    assert done.status == 0, done.stdout + done.stderr
    line = LAST_LINE.fullmatch(done.last_line)
    assert line is not None, done.stdout
    before, after = map(float, line.groups())
    assert after >= before + MARGIN, done.stdout
    assert done.last_line in (reports / "report.md").read_text(encoding="utf-8")
    assert (reports / "curve.png").read_bytes().startswith(PNG)
    [run] = re.findall(r"^grpo: run (\S+)$", done.stdout, flags=re.MULTILINE)
    books = await collect_books(world.client, f"trainingRuns/{run}", world.state_dir)
    assert problems_of(books, calls_per_rollout=ARITHMETIC_CALLS, least_reward=0.0) == []


async def test_a_multi_turn_agent_trains_and_its_calls_merge(
    world: World, repository_root: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(repository_root / "examples/calculator", tmp_path / "calculator")
    keep_lines(folder / "tasks/validation.jsonl", 8)

    done = await world.fulmen(
        "train", folder / "train.toml", "--set", "grpo.steps=2", "--set", "grpo.prompts_per_step=4", "-o", "json"
    )

    assert done.status == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    run = summary["training_runs"][-1]["name"]
    books = await collect_books(world.client, run, world.state_dir)
    succeeded = {name: books.calls[name] for name in books.calls}
    assert succeeded
    assert all(calls >= 2 for calls in succeeded.values()), succeeded
    rows = {name: books.rows[name] for name in succeeded}
    # One row holds all calls of a rollout, but for what the untrained model made of the template now and then.
    assert sum(rows.values()) < sum(succeeded.values()), (rows, succeeded)
    assert all(rows[name] < succeeded[name] for name in rows), (rows, succeeded)


def keep_lines(path: Path, count: int) -> None:
    """Cuts a file after so many lines."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:count]), encoding="utf-8")
