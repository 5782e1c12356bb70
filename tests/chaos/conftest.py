"""One stack with short leases for all chaos tests, and the folder of an agent whose rewards always vary."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.rpc.services import connect
from tests.support.algorithm.models import build_model
from tests.support.chaos.killed_training import Arena
from tests.support.folders import short_folder
from tests.support.stack import running_stack, stack_targets

TASKS = 64
# Short enough that a lost lease is noticed in the time of a test, long enough for a busy machine.
LEASE_TTL_S = "3"
# Fewer at once than there are, so that rollouts are under way nearly always.
SLOTS = 6


@pytest.fixture(scope="package")
def arena_folder() -> Iterator[Path]:
    """Yields a folder whose path leaves room for the name of a Unix socket; removes it afterwards."""
    with short_folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def arena(arena_folder: Path, repository_root: Path) -> AsyncIterator[Arena]:
    """Yields a running stack and its client."""
    agent = arena_folder / "agent"
    shutil.copytree(Path(__file__).parent / "agent", agent, ignore=shutil.ignore_patterns("__init__.py", "__pycache__"))
    await build_model(repository_root / "examples" / "arithmetic" / "make_model.py", arena_folder / "model")
    tasks = [{"input": {"question": f"{number}+{number}="}} for number in range(TASKS)]
    (agent / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    state_dir = arena_folder / "s"
    environment = {"FULMEN_STORE_LEASE_TTL_S": LEASE_TTL_S}
    async with (
        running_stack(state_dir, slots=SLOTS, environment=environment) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        yield Arena(stack=stack, client=client, state_dir=state_dir, agent=agent)
