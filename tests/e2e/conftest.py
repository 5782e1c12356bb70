"""One stack for all end-to-end tests, one after another; each trains under a policy of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.client import Client, connect
from fulmen.local.stack import LocalStack
from tests.support.commands import Done, fulmen
from tests.support.stack import running_stack, stack_targets

SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A running stack, its client, and the folder that the command line finds it by."""

    stack: LocalStack
    client: Client
    state_dir: Path

    async def fulmen(self, *arguments: str | Path) -> Done:
        """Runs a command of `fulmen` against this stack."""
        return await fulmen(*arguments, "--state-dir", self.state_dir)


@pytest.fixture(scope="package")
def world_folder() -> Iterator[Path]:
    """Yields a folder whose path leaves room for the name of a Unix socket; removes it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fulmen-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def world(world_folder: Path) -> AsyncIterator[World]:
    """Yields a running stack."""
    state_dir = world_folder / "s"
    async with (
        running_stack(state_dir, slots=SLOTS) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        yield World(stack=stack, client=client, state_dir=state_dir)
