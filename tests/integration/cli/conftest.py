"""A store on a fresh database per test, and the command line against it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result
from structlog.testing import capture_logs

from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.store.fixtures import stubs
from tests.support.store.running import StoreHandle, running_store

__all__ = ["fulmen", "store", "stubs"]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a running store. It logs in this process, which must not reach the output of a command."""
    with capture_logs():
        # Longer than any command takes on a busy machine: no session of a test renews its leases.
        async with running_store(database_url, auto_migrate=False, lease_ttl_s=60.0) as handle:
            yield handle


@pytest.fixture
def fulmen(store: StoreHandle) -> Callable[..., Awaitable[Result]]:
    """Returns a function that runs a command on the store, in this process, and checks its exit status if one is given."""

    async def run(*arguments: str | Path, status: int | None = 0, role: Role = Role.ADMIN, token: str = "") -> Result:
        environment = {
            "FULMEN_STORE_TARGET": store.target,
            # Nobody listens there; another stack of this machine may at the default port.
            "FULMEN_ALGORITHM_TARGET": os.environ.get("FULMEN_ALGORITHM_TARGET", "127.0.0.1:1"),
            "FULMEN_TOKEN": token or store.token(role),
            "COLUMNS": "200",
            "TERM": "dumb",
        }
        words = [str(argument) for argument in arguments]
        result = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
        assert status in (None, result.exit_code), result.output
        return result

    return run
