"""`fulmen usage` against a real store."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from click.testing import Result

from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.screens import check_screen
from tests.support.store.running import Stubs, create

Fulmen = Callable[..., Awaitable[Result]]


async def test_usage_is_shown_with_tokens_and_dollars(fulmen: Fulmen, stubs: Stubs) -> None:
    assert "No model calls." in (await fulmen("usage", role=Role.READER)).stdout
    (rollout,) = await create(stubs, training_run="projects/default/trainingRuns/demo")
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
    shown = (await fulmen("usage", "--run", "demo", "--by", "rollout")).stdout
    check_screen("usage", shown + (await fulmen("usage", "--by", "backend")).stdout)
    as_json = json.loads((await fulmen("usage", "--by", "all", "--days", "1", "-o", "json")).stdout)
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
    await fulmen("usage", "--by", "moon", status=Exit.USAGE)
    await fulmen("usage", "--rollout", "x", status=Exit.USAGE)
