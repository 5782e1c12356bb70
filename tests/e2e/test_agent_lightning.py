"""A program for Agent Lightning trains on Fulmen after one line was added to it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from fulmen.client.aio.client import AsyncClient
from tests.support.cli.commands import run_program
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

LIMIT_S = 240.0
ADDED = "import fulmen.compat.agentlightning.alias\n"
STEP = re.compile(r"^step (\d+): reward ([\d.]+)", re.M)


async def test_a_program_for_agent_lightning_trains_here_after_one_line_was_added(
    world: World, repository_root: Path, tmp_path: Path
) -> None:
    program = repository_root / "tests/e2e/agents/agent_lightning/sums.py"
    shutil.copy(repository_root / "examples/arithmetic/make_model.py", tmp_path)
    ported = tmp_path / "sums.py"
    ported.write_text(ADDED + program.read_text(encoding="utf-8").replace('"""\n\n', '"""\n\n', 1), encoding="utf-8")

    command = [sys.executable, str(ported), f"{tmp_path / 'make_model.py'}:build"]
    done = await run_program(command, {"FULMEN_STATE_DIR": str(world.state_dir)}, LIMIT_S)

    assert done.status == 0, done.stdout + done.stderr
    assert "without a counterpart in Fulmen: actor_rollout_ref.rollout.name" in done.stdout
    steps = {int(number): float(reward) for number, reward in STEP.findall(done.stdout)}
    assert max(steps) == 2
    async with AsyncClient(state_dir=world.state_dir) as client:
        page = [each async for each in client.rollouts.list(filter="mode = VALIDATION", limit=50)]
        ended = [each for each in page if each.agent.startswith("resources/agent.add/")]
        assert ended
        assert all(each.reward in (0.0, 0.1, 1.0) for each in ended)
        trace = await client.spans.trace(ended[0])
    assert "fulmen.message" in [span.name for span in trace]
