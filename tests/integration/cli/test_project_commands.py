"""Projects and tokens from the command line, against a real store."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from click.testing import Result

from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen_cli.connection import Connection
from fulmen_cli.exits import Exit
from tests.support.cli.screens import check_screen
from tests.support.store.running import Stubs, create

Fulmen = Callable[..., Awaitable[Result]]


async def test_a_project_is_created_changed_shown_and_listed(fulmen: Fulmen) -> None:
    await fulmen("project", "create", "team-a", "--weight", "300", "--retention-days", "30")
    rules = ("--rule", "affinity=off", "--rule", "ageing_interval=30")
    changed = await fulmen("project", "update", "team-a", "--max-running", "8", *rules)
    shown = json.loads((await fulmen("project", "get", "projects/team-a", "-o", "json")).stdout)
    assert (shown["weight"], shown["max_running"], shown["retention"]) == (300, 8, "2592000s")
    assert shown["rules"] == {"affinity": False, "ageing_interval": "30s"}
    listed = await fulmen("project", "list")
    freed = await fulmen("project", "update", "team-a", "--max-running", "0", "--retention-days", "0")
    check_screen("project", changed.stdout + listed.stdout + freed.stdout)


async def test_budgets_are_set_one_by_one_shown_with_what_is_spent_and_removed(fulmen: Fulmen, stubs: Stubs) -> None:
    await fulmen("project", "create", "team-a", "--budget", "project=12.5/month", "--budget", "run/demo=20")
    spend = usage_pb.SpendDelta(project="projects/team-a", subject="run/demo", cost_micros=1_250_000)
    await stubs.usage.SyncUsage(usage_pb.SyncUsageRequest(instance_id="i", sequence=1, spend=[spend]))
    shown = (await fulmen("project", "update", "team-a", "--budget", "agent/agent.x=0.000001/day")).stdout
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("budget")] == [
        "project=12.5/month ($0.00 spent)",
        "run/demo=20 ($1.25 spent)",
        "agent/agent.x=0.000001/day ($0.00 spent)",
    ]
    raised = ("--budget", "run/demo=30", "--budget", "project=0/month", "--budget", "agent/agent.x=0")
    await fulmen("project", "update", "team-a", *raised)
    budgets = json.loads((await fulmen("project", "get", "team-a", "-o", "json")).stdout)["model_limits"]["budgets"]
    assert {each["subject"]: (each["limit_micros"], each.get("spent_micros")) for each in budgets} == {
        "agent/agent.x": ("1", None),
        "run/demo": ("30000000", "1250000"),
    }
    for wrong in ("project", "project=x", "project=-1", "project=1/week", "=3", "shop=3"):
        await fulmen("project", "update", "team-a", "--budget", wrong, status=Exit.USAGE)


async def test_limits_of_model_calls_are_set_one_by_one_and_shown(fulmen: Fulmen) -> None:
    await fulmen("project", "create", "team-a", "--limit", "tokens_per_minute=1000")
    more = ("--limit", "attempt.concurrent_calls=2", "--limit", "attempt_token_budget=500")
    changed = await fulmen("project", "update", "team-a", *more)
    assert "tokens_per_minute=1000, attempt.concurrent_calls=2, attempt_token_budget=500" in changed.stdout
    await fulmen("project", "update", "team-a", "--limit", "tokens_per_minute=0")
    shown = json.loads((await fulmen("project", "get", "team-a", "-o", "json")).stdout)
    assert shown["model_limits"]["attempt"] == {"concurrent_calls": "2"}
    assert not shown["model_limits"].get("project")
    for wrong in ("tokens=5", "attempt_token_budget", "requests_per_minute=-1", "project.concurrent_calls=1"):
        await fulmen("project", "update", "team-a", "--limit", wrong, status=Exit.USAGE)


async def test_errors_are_one_message_and_an_exit_status(fulmen: Fulmen) -> None:
    await fulmen("project", "get", "none", status=Exit.NOT_FOUND)
    await fulmen("project", "create", "default", status=Exit.CONFLICT)
    await fulmen("project", "create", "UPPER", status=Exit.USAGE)
    await fulmen("project", "update", "default", "--rule", "affinity=maybe", status=Exit.USAGE)
    await fulmen("token", "revoke", "nothing", status=Exit.NOT_FOUND)


async def test_a_token_is_issued_used_listed_and_revoked(fulmen: Fulmen) -> None:
    await fulmen("project", "create", "team-a")
    issued = await fulmen("token", "issue", "--role", "reader", "--project", "team-a", "--subject", "ann")
    token = issued.stdout.strip()
    assert token.count(".") == 2
    assert "team-a" in (await fulmen("project", "get", token=token)).stdout
    await fulmen("project", "update", "team-a", "--weight", "5", token=token, status=Exit.FAILED)
    (known,) = json.loads((await fulmen("token", "list", "--project", "team-a", "-o", "json")).stdout)
    assert (known["role"], known["subject"]) == ("TOKEN_ROLE_READER", "ann")
    assert known["token_id"] in issued.stderr
    await fulmen("token", "revoke", known["token_id"])
    refused = await fulmen("project", "get", token=token, status=Exit.FAILED)
    assert "revoked" in refused.output
    assert "revoked (UTC)" in (await fulmen("token", "list")).stdout
    assert token not in refused.output


def test_a_connection_does_not_show_its_token() -> None:
    assert "secret" not in repr(Connection(token="a secret"))


async def test_a_queue_is_paused_shown_as_paused_and_resumed(fulmen: Fulmen, stubs: Stubs) -> None:
    (name,) = await create(stubs)
    paused = await fulmen("project", "pause", "default", "--reason", "new weights")
    queue = await fulmen("queue")
    shown = await fulmen("rollout", "show", name)
    assert "new weights" in queue.stdout.splitlines()[3]
    first = shown.stdout.splitlines()[0]
    resumed = await fulmen("project", "resume")
    again = await fulmen("project", "resume", "default")
    check_screen(
        "project-pause", paused.stdout + f"{queue.stdout.splitlines()[3]}\n{first}\n" + resumed.stdout + again.stdout
    )
    assert "paused" not in (await fulmen("queue")).stdout
    await fulmen("project", "pause", "none", status=Exit.NOT_FOUND)
