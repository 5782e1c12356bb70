"""`fulmen usage` against a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_service_kit.tokens import Role
from tests.support.cli.screens import check_screen
from tests.support.postgres import shared_server
from tests.support.store.running import StoreHandle, create, running_store


@pytest.fixture
async def store() -> AsyncIterator[StoreHandle]:
    """Yields a store."""
    server = shared_server()
    dsn = server.fresh_database()
    # The store logs in this process: what it writes must not get into the command's output.
    with capture_logs():
        async with running_store(dsn) as running:
            yield running
    server.drop(dsn)


async def fulmen(store: StoreHandle, *arguments: str) -> Result:
    where = {"FULMEN_STORE_TARGET": store.target, "FULMEN_TOKEN": store.token(Role.READER)}
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=where)


async def test_usage_is_shown_with_tokens_and_dollars(store: StoreHandle) -> None:
    assert "No model calls." in (await fulmen(store, "usage")).stdout
    stubs = await store.stubs()
    (rollout,) = await create(stubs, training_run="trainingRuns/demo")
    counts = pb.Usage(
        request_count=3, failure_count=1, prompt_token_count=120_000, completion_token_count=4, cost_micros=1_250_000
    )
    delta = pb.UsageDelta(
        project="projects/default", attempt=f"{rollout}/attempts/1", model="tiny", backend="backends/b", usage=counts
    )
    request = pb.SyncUsageRequest(
        instance_id="i",
        sequence=1,
        usage=[delta, pb.UsageDelta(project="projects/default", model="tiny", usage=pb.Usage(request_count=1))],
    )
    await stubs.usage.SyncUsage(request)
    shown = (await fulmen(store, "usage", "--run", "demo", "--by", "rollout")).stdout
    check_screen("usage", shown + (await fulmen(store, "usage", "--by", "backend")).stdout)
    as_json = json.loads((await fulmen(store, "usage", "--by", "all", "--days", "1", "-o", "json")).stdout)
    assert as_json == [
        {
            "usage": {
                "request_count": "4",
                "failure_count": "1",
                "prompt_token_count": "120000",
                "completion_token_count": "4",
                "cost_micros": "1250000",
            }
        }
    ]
    assert (await fulmen(store, "usage", "--by", "moon")).exit_code == Exit.USAGE
    assert (await fulmen(store, "usage", "--rollout", "x")).exit_code == Exit.USAGE
